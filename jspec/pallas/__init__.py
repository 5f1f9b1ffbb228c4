"""Kernels for verification, on TPU and on Hopper GPUs, each beside a plain reference.

A kernel is a function with the signature of the plain code that it replaces, and is handed
to a builder as a value: ``attend=`` and ``compact=`` of `jspec.models.decoder.make`,
``decide=`` of `jspec.make_decoder`. `jspec.pallas.select` picks the set for a device.

Importing this package loads no kernel; `jspec.pallas.compat` says what differs between
the versions of jax.
"""
