"""earnest's objectives inside other people's trainers."""
