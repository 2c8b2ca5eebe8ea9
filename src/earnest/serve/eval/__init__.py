"""`earnest eval`: automated users with preferences give feedback to a live server; it measures what the server learns
and forgets."""
