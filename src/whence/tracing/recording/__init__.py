"""Run the model once and write down what there is to know; `run.py` is the table of contents."""
