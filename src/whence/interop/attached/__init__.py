"""Any other graph becomes a Program; `attach.py` is the table of contents."""
