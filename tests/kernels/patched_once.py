"""Enable Triton's interpreter in a process that already imported Triton, and make it a third faster."""

import sys


def interpret() -> None:
    """Import Triton again, because it reads TRITON_INTERPRET when it is imported, and patch it.

    A forked process already has torch's import of Triton for GPUs. Triton's C libraries stay loaded.
    """
    for name in [x for x in sys.modules if x.partition(".")[0] == "triton" and not x.startswith("triton._C")]:
        del sys.modules[name]
    patch_once()


def patch_once() -> None:
    """Replace the functions of `triton.language` once per launch, not for each function that a kernel calls.

    Triton 3.9 visits all names of the module in each call. Versions without these functions are not patched.
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
