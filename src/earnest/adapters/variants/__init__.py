"""One file per variant. The registry imports every module in this folder: a file here is known by its place."""
