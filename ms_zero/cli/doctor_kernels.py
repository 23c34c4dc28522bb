"""Checks of the native kernels: what is built for which processor, and what is missing and why."""

import os
from pathlib import Path

from ms_zero import native
from ms_zero.cli.doctor_check import Check, ok, problem, skipped, warning
from ms_zero.errors import UserError
from ms_zero.native import cuda
from ms_zero.native.build import usable_compiler
from ms_zero.native.libraries import installed_folder

_REINSTALL = "install ms_zero again with {}=1 in the environment"


def check_kernels() -> list[Check]:
    """One line for each kind of device."""
    return [_check_cpu(), _check_cuda(), _check_ascend()]


def _check_cpu() -> Check:
    name = "kernels cpu"
    variants = native.supported_variants()
    if not variants:
        fix = "use x86_64 or aarch64, or hardware.kernels=portable"
        return problem(name, "none for this kind of machine", fix)
    best = variants[0]
    found = {each.variant: each for each in native.built_libraries(variants)}
    if best.name in found:
        others = [each for each in found if each != best.name]
        also = f"; also built: {', '.join(others)}" if others else ""
        where = {"package": "at install time", "cache": "at first use"}[found[best.name].origin]
        return ok(name, f"{best.name}, built {where} ({found[best.name].path}){also}")
    try:
        compiler = usable_compiler(native.find_compilers())
    except UserError as error:
        what, _, fix = str(error).rpartition(": ")
        return problem(name, f"not built: {what}", f"{fix}; or run with hardware.kernels=portable (slower)")
    return ok(name, f"not built yet; at first use {compiler.path} ({compiler.version}) builds {best.name}")


def _check_cuda() -> Check:
    name = "kernels cuda"
    if not cuda.cuda_sources(native.source_root()):
        return skipped(name, "this version has none")
    library = cuda.find_cuda_library()
    if library is not None:
        return ok(name, f"built for {', '.join(cuda.architectures_of(library))} ({library})")
    nvcc = cuda.find_nvcc()
    if nvcc is None:
        return skipped(name, "not built: no nvcc was found")
    return warning(name, f"not built, though {nvcc} is there", _REINSTALL.format("MS_ZERO_BUILD_CUDA"))


def _check_ascend() -> Check:
    name = "kernels ascend"
    package = installed_folder() / "ascend" / "vendors" / "ms_zero"
    if package.is_dir():
        # CANN lists the operators of a package by the device that they were compiled for.
        config = package / "op_impl" / "ai_core" / "tbe" / "config"
        devices = ", ".join(sorted(path.name for path in config.glob("*"))) or "an unknown device"
        return ok(name, f"built for {devices} ({package}); ASCEND_CUSTOM_OPP_PATH must name it to use them")
    home = os.environ.get("ASCEND_HOME_PATH")
    if not home:
        return skipped(name, "not built: ASCEND_HOME_PATH is not set; MindSpore's operators serve")
    if not Path(home).is_dir():
        return skipped(name, f"not built: ASCEND_HOME_PATH={home} is no folder; MindSpore's operators serve")
    fix = _REINSTALL.format("MS_ZERO_BUILD_ASCEND")
    return warning(name, f"not built, though CANN is in {Path(home)}; MindSpore's operators serve", fix)
