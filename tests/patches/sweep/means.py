"""A few words on what a patch does for a model."""

from __future__ import annotations

from typing import Any


def means(handle: Any) -> str:
    """Describe a handle's report; empty for a model without a handle."""
    report = getattr(handle, "report", None)
    if report is None:
        return ""
    words = [report.attention] if report.attention == "dense" else []
    if windows := {window for window in report.windows if window}:
        words.append(f"window{'s' if len(windows) > 1 else ''}")
    words += [feature.rstrip("0123456789.").removesuffix(" of").strip() for feature in report.features]
    if report.by_document:
        words.append("by document")
    if report.positions:
        words.append("positions")
    return ", ".join(words)
