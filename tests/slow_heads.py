"""Draft heads in plain float64 numpy, from the tensors as a file names them: what the loaders are judged by.

No cache, no jax, nothing of the library: every step runs the whole text again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Slow:
    """A head's tensors in the file's names, and how they are used."""

    state: dict[str, Any]
    heads: int
    kv_heads: int
    head_dim: int
    roots: tuple[str, ...]  # how the names of each layer begin
    theta: float = 10000.0
    factor: float = 1.0  # linear RoPE scaling
    eps: float = 1e-6
    fc: str | None = "fc"
    feature_layers: int = 3
    before_fc: str | None = None  # one norm of all, or one for each feature layer
    norm: str | None = "norm"
    before_residual: bool = False
    recycle_normed: bool = False
    embed_norm: str | None = None  # EAGLE-1's forms
    ids: Any = field(default=None)

    def map(self, name, x):
        out = x @ np.asarray(self.state[f"{name}.weight"], np.float64).T
        return out + self.state[f"{name}.bias"] if f"{name}.bias" in self.state else out

    def rms(self, name, x):
        scaled = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps)
        return scaled * np.asarray(self.state[f"{name}.weight"], np.float64)

    def maybe_rms(self, name, x):
        return self.rms(name, x) if f"{name}.weight" in self.state else x

    def turn(self, x):
        """RoPE of [T, heads, head_dim]."""
        half = self.head_dim // 2
        angle = np.arange(len(x))[:, None] / self.factor * self.theta ** -(np.arange(half) / half)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def attention(self, root, x):
        def split(name, count):
            return self.map(f"{root}.self_attn.{name}_proj", x).reshape(len(x), count, self.head_dim)

        q = self.turn(self.maybe_rms(f"{root}.self_attn.q_norm", split("q", self.heads)))
        k = self.turn(self.maybe_rms(f"{root}.self_attn.k_norm", split("k", self.kv_heads)))
        v = split("v", self.kv_heads)
        group = self.heads // self.kv_heads
        scores = np.einsum("qhc,khc->hqk", q, k.repeat(group, 1)) / np.sqrt(self.head_dim)
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khc->qhc", weights, v.repeat(group, 1)).reshape(len(x), -1)
        return self.map(f"{root}.self_attn.o_proj", mixed)

    def layer(self, root, x, attended):
        x = x + self.attention(root, attended)
        y = self.rms(f"{root}.post_attention_layernorm", x)
        gate = self.map(f"{root}.mlp.gate_proj", y)
        return x + self.map(
            f"{root}.mlp.down_proj", gate / (1 + np.exp(-gate)) * self.map(f"{root}.mlp.up_proj", y)
        )

    def fuse(self, features):
        if self.before_fc == "input_norm":
            features = self.rms("input_norm", features)
        if self.before_fc == "fc_norm":
            slices = np.split(features, self.feature_layers, axis=-1)
            features = np.concatenate([self.rms(f"fc_norm.{i}", x) for i, x in enumerate(slices)], axis=-1)
        return self.map(self.fc, features) if self.fc else features

    def eagle3(self, embedded, stream):
        first = self.roots[0]
        normed = self.rms(f"{first}.hidden_norm", stream)
        attended = np.concatenate([self.rms(f"{first}.input_layernorm", embedded), normed], axis=-1)
        return self.rest(self.layer(first, normed if self.before_residual else stream, attended))

    def eagle1(self, embedded, feature):
        if self.embed_norm:
            embedded = self.rms(self.embed_norm, embedded)
        x = self.map(self.fc, np.concatenate([embedded, feature], axis=-1))
        return self.rest(self.layer(self.roots[0], x, self.maybe_rms(f"{self.roots[0]}.input_layernorm", x)))

    def rest(self, x):
        """The layers after the first; what the head reads, and what the next step takes."""
        for root in self.roots[1:]:
            x = self.layer(root, x, self.rms(f"{root}.input_layernorm", x))
        hidden = self.rms(self.norm, x) if self.norm else x
        return hidden, hidden if self.recycle_normed else x

    def draft(self, method, embed, head, features, tokens, steps=2):
        """Logits of the prompt's rows and of each greedy step; the drafted ids of the target."""
        tokens, drafts, logits = list(tokens), [], []
        stream = features if method == "eagle1" else self.fuse(features)
        for step in range(steps + 1):
            hidden, output = getattr(self, method)(embed[tokens], stream)
            rows = hidden @ head.T
            logits.append(rows if step == 0 else rows[-1:])
            best = int(rows[-1].argmax())
            drafts.append(best if self.ids is None else int(self.ids[best]))
            tokens.append(drafts[-1])
            stream = np.concatenate([stream, output[-1:]])
        return np.concatenate(logits), drafts


def layer_state(
    rng, root, hidden_size, mlp, heads, kv_heads, head_dim, attended=None, biases="", norms=False
):
    """Random tensors of a layer, without the norms before its attention."""
    attn, attended = f"{root}.self_attn", attended or hidden_size
    sizes = {
        f"{attn}.q_proj": (heads * head_dim, attended),
        f"{attn}.k_proj": (kv_heads * head_dim, attended),
        f"{attn}.v_proj": (kv_heads * head_dim, attended),
        f"{attn}.o_proj": (hidden_size, heads * head_dim),
        f"{root}.mlp.gate_proj": (mlp, hidden_size),
        f"{root}.mlp.up_proj": (mlp, hidden_size),
        f"{root}.mlp.down_proj": (hidden_size, mlp),
    }
    state = {f"{name}.weight": 2 * rng.normal(size=size) / np.sqrt(size[1]) for name, size in sizes.items()}
    for name, size in sizes.items():
        if name.rsplit(".", 1)[1].removesuffix("_proj") in biases:
            state[f"{name}.bias"] = rng.normal(size=size[0])
    state |= norm_state(rng, f"{root}.post_attention_layernorm", hidden_size)
    if norms:
        state |= norm_state(rng, f"{attn}.q_norm", head_dim) | norm_state(rng, f"{attn}.k_norm", head_dim)
    return state


def norm_state(rng, name, hidden_size):
    return {f"{name}.weight": 1 + 0.3 * rng.normal(size=hidden_size)}
