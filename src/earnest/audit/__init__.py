"""The laws that any training step obeys, and how to check them."""

from earnest.audit.alive import prove as prove
from earnest.audit.verdict import Finding as Finding
from earnest.audit.verdict import LawBroken as LawBroken
from earnest.audit.verdict import Verdict as Verdict
