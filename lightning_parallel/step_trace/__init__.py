"""The user's own step without data: placeholder tensors, intercepted calls, stubs of modules, the record of a step."""
