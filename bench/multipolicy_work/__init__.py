"""What the runs of `bench.multipolicy` load by path. A file's folder is searched for modules: `bench/` has a
`kernels.py`, which transformers would take for the package of that name."""
