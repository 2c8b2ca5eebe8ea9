"""Earnest's own training steps, declared for the audit: ``prove`` checks an engine's step on a batch."""

from earnest.proving.conversations import prove_conversations as prove_conversations
from earnest.proving.proof import prove as prove
from earnest.proving.step import step_of as step_of
