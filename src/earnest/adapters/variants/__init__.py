"""One file a variant. Every module in this folder is imported by `earnest.adapters.load_builtin`."""
