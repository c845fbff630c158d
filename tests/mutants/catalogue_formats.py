"""Bugs that block formats and FP8 training could have; rows F. Each misreads a definition."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant

FORMATS, TRAINER = "sandbox.engines.block_formats", "sandbox.training.numerics"


def misread(name: str, bug: str, source: str, target: str, old: str, new: str, killer: str) -> Mutant:
    """A mutant of one edit whose reference is a definition."""
    return Mutant(name, "F", bug, f"no thread: {source} misread", (Edit(target, old, new),), killer)


BLOCK_FORMATS = (
    misread(
        "ue8m0_rounds_the_scale_down", "The scale is the power of two below amax / 448: the largest values saturate.",
        "UE8M0", f"{FORMATS}:round_fp8_ue8m0", " + (mantissa > 0.875)", "", "ue8m0_is_the_next_power_of_two",
    ),
    misread(
        "mxfp8_forgets_the_elements_exponent", "A block's scale is amax's own exponent: elements end at 2, not at 448.",
        "OCP MX", f"{FORMATS}:round_mxfp8", " - 1 - 8)", " - 1)", "mxfp8_is_the_specifications",
    ),
    misread(
        "mxfp8_blocks_run_down_columns", "32 rows share a scale, where 32 numbers of the inner axis should.", "OCP MX",
        f"{FORMATS}:round_mxfp8", "1, MX_BLOCK", "MX_BLOCK, 1", "blocks_have_their_width",
    ),
    misread(
        "e8m0_goes_on_below_its_end", "A scale below 2^-127 is not held at what E8M0 has.", "OCP MX",
        f"{FORMATS}:e8m0", "exponent.clamp(E8M0_LEAST, E8M0_MOST)", "exponent.clamp(max=E8M0_MOST)", "scales_are_e8m0",
    ),
    misread(
        "fp4_ties_go_up", "Halves between two FP4 numbers are rounded away from 0.", "E2M1",
        f"{FORMATS}:round_fp4", "(magnitude / step).round()", "(magnitude / step + 0.5).floor()",
        "fp4_has_eight_magnitudes",
    ),
    misread(
        "nvfp4_has_no_tensor_scale", "Blocks' e4m3 scales stand alone: small tensors become 0, large ones saturate.",
        "NVFP4", f"{FORMATS}:round_nvfp4", "torch.where(whole > 0, whole, 1.0)", "torch.ones_like(whole)",
        "format_errors_are_bounded",
    ),
    misread(
        "nvfp4_scale_is_not_rounded", "A block's scale stays in float32, which no tensor core reads.", "NVFP4",
        f"{FORMATS}:round_nvfp4", "round_fp8_saturating(block / FP4_MAX / whole)", "block / FP4_MAX / whole",
        "nvfp4_is_as_by_hand",
    ),
    misread(
        "nvfp4_experts_share_a_scale", "The float32 scale is of all matrices of one shape together.", "NVFP4",
        "sandbox.engines.block_precision:BlockPrecision._weights", "amax(dim=(1, 2), keepdim=True)", "amax()",
        "matrices_are_kept_each_by_itself",
    ),
    misread(
        "fp8_gradients_are_rounded", "The backward pass goes through the cast: gradients meet FP8 without a scale.",
        "FP8 training", f"{TRAINER}:_straight_through", "rounded.detach() + (x - x.detach())", "rounded",
        "fp8_trainer_is_the_fp8_engine",
    ),
    misread(
        "fp8_scale_is_along_the_outputs", "Experts' weights share a scale by input, not by output.", "FP8 training",
        f"{TRAINER}:_Fp8Weights.weight", "dim=1,", "dim=-1,", "fp8_trainer_is_the_fp8_engine",
    ),
)  # fmt: skip
