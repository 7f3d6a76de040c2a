"""From a torch module to a folder that Triton Inference Server serves and batches by itself.

``python -m export MODEL`` runs all steps; docs/export.md describes them. Imports point downward:

    __main__ → pipeline → precision, tensorrt_run → parity, tensorrt_engine, config_pbtxt
             → onnx_model, publish → recipe → errors
    __main__ → resolve → recipes → recipe

``recipes/`` holds the models that are exported by name.
"""
