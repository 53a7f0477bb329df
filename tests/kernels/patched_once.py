"""Triton's interpreter in a process that has imported Triton, and without its repeated work: a third less time."""

import sys


def interpret() -> None:
    """Import Triton anew, which reads TRITON_INTERPRET as it is imported, and patch it.

    torch imports it, so a process that is forked from one that has imported torch has Triton for GPUs. Its libraries stay.
    """
    for name in [x for x in sys.modules if x.partition(".")[0] == "triton" and not x.startswith("triton._C")]:
        del sys.modules[name]
    patch_once()


def patch_once() -> None:
    """Have a launch replace the functions of `triton.language` once, not again for each function that a kernel calls.

    Triton 3.9 goes through all names of the module at each call. Versions that lack what is replaced here stay as they are.
    """
    from triton import language
    from triton.runtime import interpreter

    patch, scope = (getattr(interpreter, name, None) for name in ("_patch_lang", "_LangPatchScope"))
    if patch is None or scope is None:
        return

    def unless_patched(function):
        modules = [x for x in function.__globals__.values() if x is language or x is language.core]
        if modules and not any(language.core.is_builtin(x.load) for x in modules):
            return scope()
        return patch(function)

    interpreter._patch_lang = unless_patched
