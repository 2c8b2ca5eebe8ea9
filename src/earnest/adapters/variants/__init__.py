"""One file per variant. The registry imports every module in this folder, so a new file needs no other entry."""
