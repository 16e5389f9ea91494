"""One part of what the doctor says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kohya_bucket.adapter.findings import Findings, Severity

__all__ = ["Section"]


@dataclass
class Section:
    """One part.

    Attributes:
        title: what was looked at.
        facts: (name, value) of what is as it is.
        findings: what is wrong with it, and what to do.
    """

    title: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    findings: Findings = field(default_factory=Findings)

    @property
    def stops(self) -> bool:
        """Something here would stop the training."""
        return bool(self.findings.of(Severity.ERROR))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        facts = [{"name": name, "text": text} for name, text in self.facts]
        return {"title": self.title, "facts": facts, "findings": [f.as_dict() for f in self.findings]}
