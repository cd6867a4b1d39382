"""Execution of plans on tensors: knows shapes and layouts, not engines. Needs torch."""
