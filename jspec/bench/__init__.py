"""Measuring speculation: `jspec.bench.measure`."""
