"""Other engines that write the same greedy text from the same weights, for `plain.py`.

Float32 weights, float32 caches, one row, one token a pass. llama.cpp is called from ctypes,
one ``llama_decode`` of one token a step: its Python class does more than decode.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Write = Callable[[], tuple[list[int], float]]
"""Writes the text again: its ids, and the seconds that they took, prefill excluded."""


def installed(*names: str) -> bool:
    """Whether all packages are there; else say which are not."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        print(f"left out, not installed: {', '.join(missing)}")
    return not missing


def transformers_engine(folder: Path, prompt: list[int], new: int, threads: int) -> Write:
    import torch
    import transformers

    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])

    def timed(count: int):
        began = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
        return out[0, len(prompt) :].tolist(), time.perf_counter() - began

    def write():
        _, first = timed(1)  # the prompt and one token, which the other engines' times do not hold either
        tokens, seconds = timed(new + 1)
        return tokens[:new], seconds - first

    return write


def write_gguf(config: Any, params: Any, file: Path) -> None:
    """Params as a float32 GGUF file without a tokenizer."""
    import gguf

    def rows(name: str, w: Any) -> np.ndarray:
        w = np.asarray(w).T
        heads = {"q": config.heads, "k": config.kv_heads}.get(name)
        if heads:  # llama.cpp turns neighbouring channels, Hugging Face's files hold halves
            w = w.reshape(heads, 2, -1, w.shape[1]).swapaxes(1, 2).reshape(w.shape)
        return np.ascontiguousarray(w)

    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("none")
    names = {"attn_norm": "attn_norm", "mlp_norm": "ffn_norm", "o": "attn_output"}
    names |= {name: f"attn_{name}" for name in "qkv"} | {n: f"ffn_{n}" for n in ("gate", "up", "down")}
    writer.add_tensor("token_embd.weight", np.asarray(params["embed"]))
    writer.add_tensor("output_norm.weight", np.asarray(params["norm"]))
    if "head" in params:
        writer.add_tensor("output.weight", rows("head", params["head"]))
    for index, layer in enumerate(params["layers"]):
        for name, w in layer.items():
            writer.add_tensor(f"blk.{index}.{names[name]}.weight", rows(name, w))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cpp_engine(file: Path, prompt: list[int], new: int, slots: int, threads: int) -> Write:
    import llama_cpp as c

    c.llama_backend_init()
    c.llama_log_set(SILENT := c.llama_log_callback(lambda *_: None), None)
    model = c.llama_model_load_from_file(str(file).encode(), c.llama_model_default_params())
    options = c.llama_context_default_params()
    options.n_ctx, options.n_threads, options.n_threads_batch = slots, threads, threads
    options.type_k = options.type_v = 0  # float32
    context = c.llama_init_from_model(model, options)
    vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))

    def run(tokens: list[int]) -> int:
        array = (c.llama_token * len(tokens))(*tokens)
        if c.llama_decode(context, c.llama_batch_get_one(array, len(tokens))):
            raise RuntimeError("llama_decode failed")
        return int(np.ctypeslib.as_array(c.llama_get_logits_ith(context, -1), (vocab,)).argmax())

    def write(keep=SILENT):  # the callback has to outlive the context
        c.llama_memory_clear(c.llama_get_memory(context), True)
        if len(prompt) > 1:
            run(prompt[:-1])
        tokens = prompt[-1:]
        began = time.perf_counter()
        for _ in range(new):
            tokens.append(run(tokens[-1:]))
        return tokens[1:], time.perf_counter() - began

    return write
