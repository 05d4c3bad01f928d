"""The backends of attention, one file each, and what they share."""
