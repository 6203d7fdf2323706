"""The parts of ``serve.py``: what runs, the engines, the probe inside them, the measurements."""
