"""The keys of a DeepSpeed config that go over one by one, and those that have no counterpart.

What DeepSpeed reads where was checked in its sources (0.14 to 0.17).
"""

from collections.abc import Mapping
from typing import Final

from ms_zero.config.translate.table import Entry, No, Only, To, dtype, integer, number, whole

TOOL: Final = "DeepSpeed"
BATCH: Final = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.accumulation_steps",
}
SCHEDULES: Final = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}

_REPORTING = "reports go to metrics.jsonl and the console, see monitor"
_PROGRAM = "the program of the model decides about it in DeepSpeed, and memory.recompute here"
_UNITS = "weights are gathered unit by unit (a block), not by numbers of elements"
_SIZES = "buffers are sized from the model"
_COMPRESSED = "communication is not quantized"
_CHECKPOINTS = "checkpoints hold whole logical tensors and load on any layout"

BATCH_KEYS: Mapping[str, Entry] = {
    "gradient_clipping": To("optim.clip_norm", number, "both clip by the global norm"),
    "steps_per_print": To("train.log_interval", whole),
}
PRECISION_KEYS: Mapping[str, Entry] = {
    "bf16.immediate_grad_update": Only(True, "gradients are reduced as they appear", "they always are, here"),
    "bf16.check_grad_overflow": Only(True, "every step is checked", "every step is checked, here"),
    "fp16.auto_cast": Only(False, "inputs are token ids", "inputs are token ids: nothing to cast"),
    "fp16.consecutive_hysteresis": Only(
        False, "the hysteresis is spent once", "hysteresis is not refilled by clean steps"
    ),
    "fp16.fp16_master_weights_and_grads": Only(
        False, "master weights are fp32", "an fp16 master copy loses small updates; master weights are fp32"
    ),
    "communication_data_type": To("precision.reduce", dtype),
    "data_types.grad_accum_dtype": To("precision.accumulate", dtype),
    "seq_parallel_communication_data_type": No("belongs to Ulysses sequence parallelism"),
    "fp32_allreduce": No("deprecated in DeepSpeed; use communication_data_type"),
    "prescale_gradients": Only(False, "gradients are divided once", "gradients are divided once, here"),
    "gradient_predivide_factor": Only(1.0, "gradients are divided once", "gradients are divided once, here"),
    "sparse_gradients": Only(False, "gradients are dense", "gradients are dense, also of embeddings"),
}
ZERO_KEYS: Mapping[str, Entry] = {
    "contiguous_gradients": Only(
        True, "gradients lie in flat buffers", "gradients always lie in flat buffers"
    ),
    "reduce_scatter": Only(
        True, "shards are reduce-scattered", "gradients of shards are always reduce-scattered"
    ),
    "overlap_comm": Only(
        True,
        "buckets are reduced while the backward pass goes on",
        "buckets are always reduced while the backward pass goes on; the numbers do not depend on it",
    ),
    "allgather_partitions": Only(True, "updated weights are all-gathered", "broadcasts are not offered"),
    "allgather_bucket_size": No(_UNITS),
    "use_multi_rank_bucket_allreduce": No("how a bucket is reduced is up to the backend"),
    "load_from_fp32_weights": Only(True, _CHECKPOINTS, "master weights are always loaded in fp32"),
    "elastic_checkpoint": No(_CHECKPOINTS),
    "legacy_stage1": Only(False, "there is one stage 1", "there is one stage 1"),
    "ignore_unused_parameters": Only(
        True, "a parameter without a gradient has gradient zero", "unused parameters are not an error"
    ),
    "round_robin_gradients": Only(False, "shards are contiguous", "shards are contiguous"),
    "sub_group_size": No("the update runs over whole shards; offload.fraction bounds its memory"),
    "zero_quantized_weights": Only(False, _COMPRESSED, _COMPRESSED),
    "zero_quantized_nontrainable_weights": Only(False, _COMPRESSED, _COMPRESSED),
    "zero_quantized_gradients": Only(False, _COMPRESSED, _COMPRESSED),
    "zeropp_loco_param": No(_COMPRESSED),
    "zero_hpz_partition_size": Only(
        1, "no second copy of the weights", "no second copy of the weights is kept"
    ),
    "mics_hierarchical_params_gather": Only(False, _UNITS, _UNITS),
    "stage3_max_live_parameters": No(_UNITS),
    "stage3_max_reuse_distance": No(_UNITS),
    "stage3_param_persistence_threshold": No("every weight is sharded; small ones travel with their unit"),
    "stage3_model_persistence_threshold": No("every weight is sharded; small ones travel with their unit"),
    "stage3_module_granularity_threshold": No(_UNITS),
    "stage3_use_all_reduce_for_fetch_params": No("how a unit is gathered is up to the backend"),
    "stage3_gather_16bit_weights_on_model_save": No(_CHECKPOINTS),
    "stage3_gather_fp16_weights_on_model_save": No(_CHECKPOINTS),
    "memory_efficient_linear": No("which activations a layer saves is up to memory.recompute"),
    "pipeline_loading_checkpoint": No(_CHECKPOINTS),
    "override_module_apply": No("belongs to torch modules"),
    "log_trace_cache_warnings": No(_REPORTING),
    "enable_sanity_checks": No("train.debug_collectives checks every collective"),
    "cpu_offload_use_pin_memory": No("host buffers are pinned where the device needs it"),
}
OFFLOAD_KEYS: Mapping[str, Entry] = {
    "pin_memory": No("host buffers are pinned where the device needs it"),
    "buffer_count": No(_SIZES),
    "buffer_size": No(_SIZES),
    "max_in_cpu": No(_SIZES),
    "pipeline_read": No("transfers overlap with the update where the device can"),
    "pipeline_write": No("transfers overlap with the update where the device can"),
    "pipeline": No("transfers overlap with the update where the device can"),
    "fast_init": No("states are initialised in place"),
    "super_offload": No("offload.fraction divides the update between device and host"),
    "cpuadam_cores_perc": No("the host update uses the cores of the worker"),
}
ONLY_STAGE_3 = (
    "stage3_",
    "sub_group_size",
    "zero_hpz_",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "mics_",
    "memory_efficient_linear",
    "offload_param",
    "cpu_offload_param",
)
ONLY_BELOW_3 = ("allgather_", "round_robin_", "ignore_unused", "legacy_stage1", "use_multi_rank_")
OTHER_KEYS: Mapping[str, Entry] = {
    "zero_allow_untested_optimizer": No("a permission; the optimizers here are tested with every stage"),
    "zero_force_ds_cpu_optimizer": No("which kernel updates is decided by offload.optimizer"),
    "dataloader_drop_last": Only(True, "only whole batches are drawn", "only whole batches are drawn"),
    "wall_clock_breakdown": No(_REPORTING),
    "memory_breakdown": No(_REPORTING),
    "dump_state": No("'ms-zero config show' prints the effective config"),
    "disable_allgather": No("updated weights have to be gathered"),
    "vocabulary_size": No("belongs to sparse embeddings"),
    "use_data_before_expert_parallelism": No("the order of axes is fixed, see the mesh"),
    "use_data_before_expert_parallel_": No("the order of axes is fixed, see the mesh"),
    "graph_harvesting": No("captures CUDA graphs"),
    "dataloader_batch_size": No("the loader follows the batch sizes of train"),
    "train_steps": To("train.steps", whole),
    "seed": To("train.seed", whole),
    "sequence_parallel_size": To("parallel.cp", integer, "DeepSpeed's sequence parallelism is Ulysses"),
    "tensor_parallel.autotp_size": To("parallel.tp", lambda value: max(1, integer(value))),
    "tensor_parallel.tp_size": To("parallel.tp", integer),
    "pipeline.stages": To("parallel.pp", integer),
}
OTHER_SECTIONS: Mapping[str, str] = {
    "activation_checkpointing": _PROGRAM,
    "tensor_parallel": "layers are split by the recipe of the model",
    "pipeline": "stages get equal numbers of blocks",
    "checkpoint": _CHECKPOINTS,
    "data_types": "see precision",
    "amp": "apex amp patches functions; the precision policy is explicit here",
    "torch_autocast": "autocast picks dtypes per operation; the precision policy is explicit here",
    "flops_profiler": _REPORTING,
    "comms_logger": _REPORTING,
    "tensorboard": _REPORTING,
    "wandb": _REPORTING,
    "comet": _REPORTING,
    "csv_monitor": _REPORTING,
    "timers": _REPORTING,
    "aio": "asynchronous file access is sized automatically",
    "elasticity": "checkpoints load on any number of workers; the batch stays what train says",
    "autotuning": "'ms-zero plan' searches layouts before a run",
    "compression_training": "compression of models is not offered",
    "data_efficiency": "curricula are not offered",
    "curriculum_learning": "curricula are not offered; train.rampup_* grows the batch",
    "eigenvalue": "belongs to compression",
    "progressive_layer_drop": "layers are not dropped",
    "sparse_attention": "attention is dense",
    "quantize_training": "quantized training is not offered",
    "weight_quantization": "quantized training is not offered",
    "hybrid_engine": "belongs to RLHF inference",
    "nebula": "a storage service; " + _CHECKPOINTS,
    "datastates_ckpt": _CHECKPOINTS,
    "compile": "torch.compile",
    "zenflow": "asynchronous updates change the numbers",
    "optimizer.legacy_fusion": "there is one fused update",
    "optimizer.params.torch_adam": "there is one AdamW",
    "optimizer.params.fused": "there is one AdamW",
    "optimizer.params.foreach": "there is one AdamW",
}
