"""What other libraries release, declared for the audit; one function per library yields (name, what makes it)."""
