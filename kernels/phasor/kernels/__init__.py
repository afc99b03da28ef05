"""Kernels: attention over pages and writing them. Imports nothing of ours."""
