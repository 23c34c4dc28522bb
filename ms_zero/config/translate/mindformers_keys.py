"""The keys of MindFormers files that go over one by one, and those that have no counterpart."""

from collections.abc import Mapping
from types import MappingProxyType

from ms_zero.config.translate.table import Entry, No, Only, To, integer

_CKPT = "a checkpoint of MindFormers; checkpoints here hold whole logical tensors and load on any layout"
_LOADER = "the loader is part of the package"
_GRAPH = "belongs to the graph compiler's own parallelism"
_CONTEXT = "a setting of the MindSpore context"
_NOT_BOTH = "the method decides"
_PROFILER = "profiles are taken outside of the run file"
_EQUAL = "stages get equal numbers of blocks"
SHAPE_OF_EXPERTS = "the shape of a model with experts is not translated; describe it with model.family moe"
"""Why the keys of such a model are left out."""
_EXCHANGE = "tokens go straight to the ranks of their experts, as many as there are"


def _schedule(name: object) -> object:
    """MindSpore's name of an order as a run file has it."""
    return "zb-v" if name == "zero_bubble_v" else name


LLAMA_LIKE = ("llama", "qwen2", "qwen3", "mistral", "internlm", "yi")
"""Words in the type of a model whose blocks are those of family llama."""

SHAPE: Mapping[str, str] = {
    "hidden_size": "model.hidden_size",
    "num_layers": "model.num_layers",
    "num_hidden_layers": "model.num_layers",
    "num_heads": "model.num_heads",
    "num_attention_heads": "model.num_heads",
    "head_dim": "model.head_dim",
    "vocab_size": "model.vocab_size",
    "max_position_embedding": "model.max_seq_len",
    "max_position_embeddings": "model.max_seq_len",
    "rms_norm_eps": "model.norm_eps",
    "layernorm_epsilon": "model.norm_eps",
    "theta": "model.rope_theta",
    "rope_theta": "model.rope_theta",
    "initializer_range": "model.init_std",
    "tie_word_embeddings": "model.tie_embeddings",
    "qkv_has_bias": "model.qkv_bias",
    "attention_bias": "model.qkv_bias",
    "qk_layernorm": "model.qk_norm",
}
GROUPS = ("n_kv_heads", "num_key_value_heads", "num_query_groups")

SHARED: Mapping[str, Entry] = {
    "seed": To("train.seed"),
    "output_dir": To("train.output_dir"),
    "run_mode": Only("train", "training", "only training is translated"),
    "use_parallel": No("the number of workers is told to 'ms-zero launch'"),
    "use_legacy": No("models are those of the package"),
    "trainer.type": No("the trainer is part of the package"),
    "trainer.model_name": No("a name; see model"),
    "optimizer.weight_decay_include": No("matrices decay; norms, biases and embeddings do not"),
    "optimizer.weight_decay_exclude": No("matrices decay; norms, biases and embeddings do not"),
    "optimizer.use_fused": No("there is one fused update"),
    "optimizer.swap": To("offload.optimizer", lambda on: "cpu" if on else "none"),
    "optimizer.accumulate_allreduce_grads_in_fp32": To(
        "precision.accumulate", lambda on: "fp32" if on else "bf16"
    ),
}

# How context parallelism works: the key, and names there -> names here.
GRAPH_METHOD = "parallel_config.context_parallel_algo"
GRAPH_METHODS = MappingProxyType({"colossalai_cp": "ring", "ulysses_cp": "ulysses"})
PYNATIVE_METHOD = "parallelism.context_parallel_method"
PYNATIVE_METHODS = MappingProxyType({"colossal": "ring", "ulysses": "ulysses"})

GRAPH: Mapping[str, Entry] = {
    "parallel_config.model_parallel": To("parallel.tp"),
    "parallel_config.pipeline_stage": To("parallel.pp"),
    "parallel_config.context_parallel": To("parallel.cp"),
    "parallel_config.expert_parallel": To("parallel.ep"),
    "parallel_config.use_seq_parallel": To("parallel.sequence_parallel", bool),
    "parallel_config.vocab_emb_dp": No("the embedding is split with tensor parallelism"),
    "parallel_config.gradient_aggregation_group": No("see parallel.bucket_mb"),
    "parallel_config.seq_split_num": Only(
        1, "sequences are not split", "see parallel.sequence_parts, with schedule seqpipe of engine graph"
    ),
    "parallel_config.ulysses_degree_in_cp": Only(1, _NOT_BOTH, "ring and Ulysses are not mixed"),
    "parallel_config.mem_coeff": No(_GRAPH),
    "parallel_config.optimizer_shard": No("an old name; parallel.enable_parallel_optimizer decides"),
    "parallel_config.expert_model_parallel": No("experts are cut over parallel.tp"),
    "parallel_config.npu_nums_per_device": No(_EXCHANGE),
    "parallel_config.reduce_in_head": No(_GRAPH),
    "parallel.parallel_optimizer_config.gradient_accumulation_shard": To(
        "parallel.sync_each_microbatch", bool
    ),
    "parallel.parallel_optimizer_config.parallel_optimizer_threshold": No("every weight is sharded"),
    "parallel.pipeline_config.pipeline_interleave": No("see pp_interleave_num"),
    "parallel.pipeline_config.pipeline_scheduler": To("parallel.schedule", _schedule),
    "context.device_target": To("hardware.target"),
    "context.mode": No("this is the eager engine's file; the graph engine reads the same one"),
    "context.max_device_memory": No("a limit of the allocator; 'ms-zero plan' tells what fits"),
    "context.deterministic": No("reductions sum in a fixed order"),
    "model.model_config.pp_interleave_num": To("parallel.virtual_stages", integer),
    "model.model_config.offset": Only(0, _EQUAL, _EQUAL),
    "model.model_config.use_flash_attention": No("kernels are chosen by the device"),
    "runner_config.epochs": No("train.steps counts optimizer steps: epochs x samples / global batch"),
    "runner_config.sink_mode": No("data is not sunk into the device"),
    "runner_config.sink_size": No("data is not sunk into the device"),
    "runner_config.num_classes": No("belongs to vision"),
    "runner_config.image_size": No("belongs to vision"),
    "runner_config.initial_epoch": No("runs resume from train.output_dir"),
    "runner_config.initial_step": No("runs resume from train.output_dir"),
    "runner_config.has_trained_epoches": No("runs resume from train.output_dir"),
    "runner_config.has_trained_steps": No("runs resume from train.output_dir"),
    "runner_config.stop_step": To("train.steps"),
    "resume_training": To("checkpoint.resume", lambda on: "auto" if on else "never"),
    "load_checkpoint": Only("", "no weights are loaded", _CKPT),
    "auto_tune": Only(
        False, "'ms-zero plan' searches layouts", "'ms-zero plan' searches layouts before a run"
    ),
    "do_eval": Only(False, "see train.eval_interval", "set train.eval_interval"),
    "eval_step_interval": To("train.eval_interval"),
    "eval_epoch_interval": No("set train.eval_interval in steps"),
    "train_dataset.batch_size": No("runner_config.batch_size goes first in MindFormers"),
    "train_dataset.seed": No("see train.seed"),
}
GRAPH_SECTIONS: Mapping[str, str] = {
    "parallel": _GRAPH,
    "context": _CONTEXT,
    "recompute_config": "every block is treated alike, see memory.recompute",
    "moe_config": SHAPE_OF_EXPERTS,
    "swap_config": "see offload and memory.activations",
    "runner_wrapper": "one step for every layout",
    "model.arch": "see model.family",
    "model.model_config": "has no counterpart in the models of this version",
    "model": "see model.family",
    "train_dataset": _LOADER,
    "train_dataset_task": _LOADER,
    "eval_dataset": "see data.validation_fraction",
    "eval_dataset_task": "see data.validation_fraction",
    "eval_callbacks": "see train.eval_interval",
    "metric": "the loss is the metric",
    "processor": "see data.tokenizer",
    "lr_schedule": "see optim.schedule",
    "layer_scale": "one learning rate for all layers",
    "layer_decay": "one learning rate for all layers",
    "lr_scale": "one learning rate for all layers",
    "lr_scale_factor": "one learning rate for all layers",
    "auto_trans_ckpt": _CKPT,
    "load_ckpt_format": _CKPT,
    "src_strategy_path_or_dir": _CKPT,
    "remove_redundancy": _CKPT,
    "ignore_data_skip": "the data cursor is restored with the checkpoint",
    "data_skip_steps": "the data cursor is restored with the checkpoint",
    "pretrained_model_dir": "name a preset of models/, or write the model section",
    "filepath_prefix": _PROFILER,
    "only_save_strategy": _GRAPH,
    "remote_save_url": _CKPT,
    "ms_enable_transformers": _CONTEXT,
    "enable_mindio_ttp_save_ckpt": _CKPT,
    "monitor_config": "see monitor",
    "tensorboard": "see monitor",
}
GRAPH_KNOWN = (
    "parallel_config.data_parallel",
    "parallel_config.micro_batch_num",
    "parallel_config.optimizer_weight_shard_size",
    "parallel.enable_parallel_optimizer",
    "micro_batch_interleave_num",
    "runner_config.batch_size",
    "runner_config.gradient_accumulation_steps",
    "recompute_config.recompute",
    "recompute_config.select_recompute",
    "runner_wrapper.scale_sense",
    "runner_wrapper.use_clip_grad",
    "lr_schedule.type",
    "lr_schedule.learning_rate",
    "optimizer.type",
    "callbacks",
    *GRAPH_SECTIONS,
)

PYNATIVE: Mapping[str, Entry] = {
    "training.seed": To("train.seed"),
    "training.deterministic": No("reductions sum in a fixed order"),
    "parallelism.tensor_parallel": To("parallel.tp"),
    "parallelism.pipeline_parallel": To("parallel.pp"),
    "parallelism.context_parallel": To("parallel.cp"),
    "parallelism.expert_parallel": To("parallel.ep"),
    "parallelism.data_parallel_shard_strategy": Only(
        "optim_grads_params", "stage 3", "see parallel.zero_stage: 1 optim, 2 optim_grads"
    ),
    "parallelism.disable_gradient_division": Only(
        True, "gradients are divided once", "gradients are divided once"
    ),
    "parallelism.context_parallel_async": No("how the ring overlaps is up to the device"),
    "parallelism.context_parallel_mask_type": Only("causal", "attention is causal", "attention is causal"),
    "parallelism.ulysses_degree_in_cp": Only(None, _NOT_BOTH, "ring and Ulysses are not mixed"),
    "parallelism.pipeline_parallel_layers_per_stage": No(_EQUAL),
    "parallelism.pipeline_parallel_schedule": To("parallel.schedule"),
    "parallelism.pipeline_parallel_interleave_num": To("parallel.virtual_stages", integer),
    "parallelism.pipeline_parallel_overlap_p2p": No("how stages talk is up to the pipeline"),
    "parallelism.pipeline_parallel_overlap_b_f": No("how stages talk is up to the pipeline"),
    "parallelism.pipeline_parallel_enable_dxdw_split": No("see the schedules of a pipeline"),
    "parallelism.npu_nums_per_device": No(_EXCHANGE),
    "parallelism.moe_token_dispatcher_type": No(_EXCHANGE),
    "checkpoint.enable_save": Only(True, "the last step is always saved", "the last step is always saved"),
    "checkpoint.save_path": To("train.output_dir", str, "checkpoints lie below it"),
    "checkpoint.save_max": To("checkpoint.keep"),
    "checkpoint.save_interleaved_steps": To("checkpoint.interval"),
    "checkpoint.load_path": Only("", "runs resume from train.output_dir", _CKPT),
    "model.use_flash_attention": No("kernels are chosen by the device"),
    "swap.enable": To("memory.activations", lambda on: "host" if on is True else "device"),
}
PYNATIVE_SECTIONS: Mapping[str, str] = {
    "checkpoint": _CKPT,
    "model": "has no counterpart in the models of this version",
    "train_dataset": _LOADER,
    "monitor": "see monitor",
    "profiler": _PROFILER,
    "recompute": "every block is treated alike, see memory.recompute",
    "recompute_comm": "communication is not recomputed",
    "swap": "see memory.activations",
    "lr_scheduler": "see optim.schedule",
    "optimizer": "see optim",
}
PYNATIVE_KNOWN = (
    "training.steps",
    "training.local_batch_size",
    "training.global_batch_size",
    "training.max_norm",
    "parallelism.data_parallel_shard",
    "parallelism.reshard_after_forward_policy",
    "parallelism.cpu_offload",
    "parallelism.sequence_parallel",
    "lr_scheduler.type",
    "lr_scheduler.learning_rate",
    "optimizer.type",
    "callbacks",
    *PYNATIVE_SECTIONS,
)
SECTIONS: Mapping[str, str] = {
    "profile": _PROFILER,
    "profile_start_step": _PROFILER,
    "profile_stop_step": _PROFILER,
    "profile_communication": _PROFILER,
    "profile_memory": _PROFILER,
    "init_start_profile": _PROFILER,
    "remote_save_url": _CKPT,
}
