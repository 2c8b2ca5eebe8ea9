"""`earnest eval`: automated users who want something, against a live server; does it learn, and what does it cost?"""
