"""What the model test does: rules that call the kernel and compare every answer with the model's.

One module per concern, each a part of the machine in ``tests.kernel.test_model``.
"""
