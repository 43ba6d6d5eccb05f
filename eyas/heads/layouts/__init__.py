"""The public layouts of a head, one file a family of writers, each turning a config.json into our configuration and back.

What all share stands apart: `llama` (the keys of a Llama configuration), `rope`, `taps` and `names` (of the tensors).
"""
