"""earnest's objectives inside other trainers."""
