import inspect
import re
from pathlib import Path

import pytest

from ms_zero import config
from ms_zero.config import EXPLANATIONS, RULES, schema

LLAMA = """\
include: [models/llama-tiny]
data: {seq_len: 64}
train: {steps: 10, global_batch_size: 8, accumulation_steps: 1, output_dir: out}
optim: {warmup_steps: 2}
"""
SCALING = "model.rope_scaling={factor: 8, low_freq_factor: %s, high_freq_factor: 4, original_max_seq_len: 64}"
GPT = LLAMA.replace("llama", "gpt")
TOP_K, TOP_G = "model.experts_per_token", "model.groups_per_token"
MIXTRAL, DEEPSEEK = LLAMA.replace("llama", "mixtral"), LLAMA.replace("llama", "deepseek")
GPT_MICRO_1 = GPT.replace("accumulation_steps: 1", "micro_batch_size: 1")
RAMPUP = "train={rampup_samples: 30, rampup_start: %s, rampup_increment: %s}"
ULYSSES = ["parallel.cp=2", "parallel.context=ulysses"]
TWELVE_HEADS = ["model.num_heads=12", "model.head_dim=16"]
STAGES = ["parallel.schedule=interleaved", "parallel.virtual_stages=2"]
SCHEDULE, WRONG_ORDER = (Path(__file__).with_name(f"{name}.csv") for name in ("schedule", "wrong_order"))
ON_910B2 = ["hardware.target=Ascend", "hardware.device=ascend-910b2"]
AUTO_PARALLEL = ["engine=graph", *ON_910B2, "train.eval_interval=0"]
STAGES_2 = ["parallel.pp=2", "train.accumulation_steps=2"]
PARTS_OF_SEQUENCES = [*STAGES_2, "parallel.schedule=seqpipe", "precision.policy=bf16"]
TOKENIZER = Path(__file__).with_name("tokenizer.json")
STORED = ["data.source=megatron", "data.files=[a]", "data.tokenizer=none"]
PARTS = "data.parts=[{source: %s, weight: 1}]"
WEIGHTS = "data={source: mixture, parts: [{source: stdlib, weight: 1}, {source: stdlib, weight: %s}]}"

# rule, key of the finding, overrides that violate it, overrides next to them that do not, workers, config
CASES = [
    ("MZ014", "optim.beta1", ["optim.kind=sgd", "optim.beta1=0.9"], ["optim.beta1=0.9"], 1, GPT),
    ("MZ014", "optim.eps", ["optim.kind=sgd", "optim.eps=1e-8"], ["optim.kind=sgd"], 1, GPT),
    ("MZ014", "optim.min_lr", ["optim.schedule=constant", "optim.min_lr=0.0"], ["optim.min_lr=0.0"], 1, GPT),
    (
        "MZ014",
        "optim.decay_steps",
        ["optim.decay_steps=2"],
        ["optim.decay_steps=2", "optim.schedule=wsd"],
        1,
        GPT,
    ),
    ("MZ014", "data.files", ["data.files=[a]"], ["data.files=[a]", "data.source=files"], 1, GPT),
    (
        "MZ014",
        "train.eval_samples",
        ["train.eval_samples=9"],
        ["train.eval_samples=9", "train.eval_interval=5"],
        1,
        GPT,
    ),
    (
        "MZ015",
        "optim.min_lr",
        ["optim.min_lr=0.0", "optim.schedule=constant"],
        ["optim.schedule=constant"],
        1,
        GPT,
    ),
    ("MZ020", "model.num_heads", ["model.num_heads=3"], ["model.num_heads=8"], 1, GPT),
    ("MZ020", "model.num_heads", ["model.num_heads=6"], ["model.num_heads=6", "model.head_dim=16"], 1, LLAMA),
    ("MZ021", "model.num_kv_heads", ["model.num_kv_heads=3"], ["model.num_kv_heads=1"], 1, LLAMA),
    ("MZ021", "model.num_kv_heads", ["model.num_kv_heads=8"], ["model.num_kv_heads=4"], 1, LLAMA),
    ("MZ022", "model.head_dim", ["model.head_dim=33"], ["model.head_dim=34"], 1, LLAMA),
    ("MZ023", "model.vocab_size", ["model.vocab_size=256"], ["model.vocab_size=257"], 1, GPT),
    ("MZ024", "model.rope_scaling.low_freq_factor", [SCALING % 4], [SCALING % 1], 1, LLAMA),
    ("MZ025", "model.experts_per_token", [f"{TOP_K}=5"], [f"{TOP_K}=4"], 1, MIXTRAL),
    ("MZ025", "model.experts_per_token", [f"{TOP_K}=5"], [f"{TOP_K}=4"], 1, DEEPSEEK),
    ("MZ025", "model.expert_groups", ["model.expert_groups=3"], ["model.expert_groups=2"], 1, DEEPSEEK),
    ("MZ025", "model.groups_per_token", [f"{TOP_G}=5"], [f"{TOP_G}=1"], 1, DEEPSEEK),
    ("MZ026", "model.dense_layers", ["model.dense_layers=5"], ["model.dense_layers=4"], 1, DEEPSEEK),
    ("MZ026", "model.ffn_hidden_size", ["model.dense_layers=1"], [], 1, MIXTRAL),
    ("MZ026", "model.shared_gate", ["model.shared_gate=true"], [], 1, MIXTRAL),
    ("MZ027", "model.latent.rope_head_dim", ["model.latent.rope_head_dim=7"], [], 1, DEEPSEEK),
    ("MZ027", "model.num_kv_heads", ["model.num_kv_heads=2"], ["model.latent.nope_head_dim=7"], 1, DEEPSEEK),
    ("MZ027", "model.qk_norm", ["model.qk_norm=true"], ["model.qk_norm=false"], 1, DEEPSEEK),
    ("MZ045", "parallel.ep", ["parallel.ep=4"], ["parallel.ep=2"], 2, DEEPSEEK),
    ("MZ045", "parallel.ep", ["parallel.ep=4", "model.num_experts=6"], ["parallel.ep=4"], 4, MIXTRAL),
    ("MZ045", "parallel.ep", ["parallel.ep=2"], ["parallel.ep=1"], 2, LLAMA),
    ("MZ030", "data.seq_len", ["data.seq_len=257"], ["data.seq_len=256"], 1, GPT),
    ("MZ030", "data.seq_len", ["model.max_seq_len=63"], ["model.max_seq_len=64"], 1, LLAMA),
    ("MZ031", "data.files", ["data.source=files"], ["data.source=files", "data.files=[a]"], 1, GPT),
    ("MZ031", "data.files", ["data.source=files", "data.files=[]"], [], 1, GPT),
    (
        "MZ032",
        "data.validation_fraction",
        ["train.eval_interval=5", "data.validation_fraction=0"],
        ["data.validation_fraction=0"],
        1,
        GPT,
    ),
    ("MZ031", "data.files", ["data.source=jsonl"], ["data.source=jsonl", "data.files=[a]"], 1, GPT),
    ("MZ031", "data.files", ["data.source=megatron"], ["data.source=megatron", "data.files=[a]"], 1, GPT),
    (
        "MZ033",
        "data.tokenizer_file",
        ["data.tokenizer=file"],
        ["data.tokenizer=file", f"data.tokenizer_file={TOKENIZER}"],
        1,
        GPT,
    ),
    (
        "MZ033",
        "data.tokenizer_file",
        ["data.tokenizer=file", f"data.tokenizer_file={TOKENIZER}", "data.eot_token=<eod>"],
        ["data.tokenizer=file", f"data.tokenizer_file={TOKENIZER}", "data.eot_token=b"],
        1,
        GPT,
    ),
    (
        "MZ023",
        "model.vocab_size",
        ["data.tokenizer=file", f"data.tokenizer_file={TOKENIZER}", "model.vocab_size=4"],
        ["data.tokenizer=file", f"data.tokenizer_file={TOKENIZER}", "model.vocab_size=5"],
        1,
        GPT,
    ),
    ("MZ034", "model.vocab_size", STORED, [*STORED, "model.vocab_size=9"], 1, GPT),
    (
        "MZ034",
        "data.tokenizer",
        ["data.tokenizer=none", "model.vocab_size=9"],
        [*STORED, "model.vocab_size=9"],
        1,
        GPT,
    ),
    (
        "MZ034",
        "data.tokenizer",
        [PARTS % "jsonl, files: [a]", "data.source=mixture", "data.tokenizer=none", "model.vocab_size=9"],
        [PARTS % "megatron, files: [a]", "data.source=mixture", "data.tokenizer=none", "model.vocab_size=9"],
        1,
        GPT,
    ),
    ("MZ035", "data.parts", ["data.source=mixture"], ["data.source=mixture", PARTS % "stdlib"], 1, GPT),
    (
        "MZ035",
        "data.parts[0].files",
        ["data.source=mixture", PARTS % "files"],
        ["data.source=mixture", PARTS % "files, files: [a]"],
        1,
        GPT,
    ),
    (
        "MZ035",
        "data.parts[0].files",
        ["data.source=mixture", PARTS % "stdlib, files: [a]"],
        ["data.source=mixture", PARTS % "stdlib, files: []"],
        1,
        GPT,
    ),
    ("MZ036", "data.parts[1].weight", [WEIGHTS % 1.5e-5], [WEIGHTS % 1.6e-5], 1, GPT),
    ("MZ014", "data.parts", [PARTS % "stdlib"], [PARTS % "stdlib", "data.source=mixture"], 1, GPT),
    ("MZ014", "data.eot_token", ["data.eot_token=b"], [], 1, GPT),
    ("MZ014", "data.tokenizer_file", ["data.tokenizer_file=b"], [], 1, GPT),
    ("MZ040", "train.global_batch_size", ["train.micro_batch_size=7"], ["train.micro_batch_size=4"], 2, GPT),
    (
        "MZ041",
        "train",
        ["train.accumulation_steps=auto"],
        ["train.global_batch_size=auto", "train.micro_batch_size=1"],
        2,
        GPT,
    ),
    (
        "MZ042",
        "train.global_batch_size",
        ["train.global_batch_size=9"],
        ["train.global_batch_size=10"],
        2,
        GPT,
    ),
    ("MZ043", "train.eval_interval", ["train.eval_interval=11"], ["train.eval_interval=10"], 1, GPT),
    ("MZ043", "train.log_interval", ["train.log_interval=11"], ["train.log_interval=10"], 1, GPT),
    ("MZ043", "checkpoint.interval", ["checkpoint.interval=11"], ["checkpoint.interval=10"], 1, GPT),
    ("MZ044", "train.rampup_start", [RAMPUP % (8, 2)], [RAMPUP % (4, 2)], 2, GPT_MICRO_1),
    ("MZ044", "train.rampup_start", [RAMPUP % (3, 2)], [RAMPUP % (2, 2)], 2, GPT_MICRO_1),
    ("MZ044", "train.rampup_start", [RAMPUP % ("null", 2)], [RAMPUP % (6, 2)], 2, GPT_MICRO_1),
    ("MZ044", "train.rampup_increment", [RAMPUP % (2, "null")], [RAMPUP % (2, 6)], 2, GPT_MICRO_1),
    ("MZ044", "train.rampup_increment", [RAMPUP % (2, 4)], [RAMPUP % (2, 3 * 2)], 2, GPT_MICRO_1),
    ("MZ044", "train.rampup_increment", [RAMPUP % (2, 3)], [RAMPUP % (2, 2)], 2, GPT_MICRO_1),
    ("MZ050", "optim.warmup_steps", ["optim.warmup_steps=10"], ["optim.warmup_steps=9"], 1, GPT),
    (
        "MZ051",
        "optim.decay_steps",
        ["optim.schedule=wsd"],
        ["optim.schedule=wsd", "optim.decay_steps=8"],
        1,
        GPT,
    ),
    (
        "MZ052",
        "optim.decay_steps",
        ["optim.schedule=wsd", "optim.decay_steps=9"],
        ["optim.schedule=wsd", "optim.decay_steps=8"],
        1,
        GPT,
    ),
    ("MZ053", "optim.min_lr", ["optim.min_lr=4e-4"], ["optim.min_lr=3e-4"], 1, GPT),
    ("MZ060", "parallel.dp_shard", ["parallel.dp_shard=4"], ["parallel.dp_shard=2"], 2, GPT),
    ("MZ060", "parallel.dp_shard", ["parallel.dp_shard=2"], ["parallel.dp_shard=1"], 1, GPT),
    ("MZ061", "parallel.dp_shard", ["parallel.dp_replicate=3"], ["parallel.dp_replicate=2"], 4, GPT),
    ("MZ054", "parallel.tp", ["parallel.tp=8"], ["parallel.tp=4"], 8, GPT),
    (
        "MZ054",
        "parallel.tp",
        ["parallel.tp=6", "model.num_heads=12", "model.head_dim=16", "model.num_kv_heads=4"],
        ["parallel.tp=6", "model.num_heads=12", "model.head_dim=16", "model.num_kv_heads=3"],
        6,
        LLAMA,
    ),
    ("MZ054", "parallel.tp", ["parallel.tp=4", "model.ffn_hidden_size=3"], ["parallel.tp=4"], 4, LLAMA),
    (
        "MZ055",
        "data.seq_len",
        ["parallel.tp=2", "parallel.sequence_parallel=true", "data.seq_len=63"],
        ["parallel.tp=2", "parallel.sequence_parallel=true"],
        2,
        GPT,
    ),
    ("MZ055", "parallel.sequence_parallel", ["parallel.sequence_parallel=true"], [], 1, GPT),
    (
        "MZ056",
        "parallel.tp",
        ["hardware.target=Ascend", "hardware.device=ascend-910b2", "parallel.tp=16", "model.num_heads=16"],
        ["hardware.target=Ascend", "hardware.device=ascend-910b2", "parallel.tp=8", "model.num_heads=16"],
        16,
        GPT.replace("global_batch_size: 8", "global_batch_size: 16"),
    ),
    ("MZ062", "data.seq_len", ["parallel.cp=2", "data.seq_len=62"], ["parallel.cp=2"], 2, GPT),
    ("MZ062", "data.seq_len", [*ULYSSES, "data.seq_len=63"], [*ULYSSES, "data.seq_len=62"], 2, GPT),
    ("MZ062", "parallel.cp", [*ULYSSES, "parallel.tp=4"], ["parallel.cp=2", "parallel.tp=4"], 8, GPT),
    (
        "MZ062",
        "parallel.cp",
        [*ULYSSES, "parallel.cp=6", "data.seq_len=60", *TWELVE_HEADS, "model.num_kv_heads=4"],
        [*ULYSSES, "parallel.cp=6", "data.seq_len=60", *TWELVE_HEADS, "model.num_kv_heads=3"],
        6,
        LLAMA,
    ),
    (
        "MZ055",
        "data.seq_len",
        ["parallel.tp=4", "parallel.cp=2", "parallel.sequence_parallel=true", "data.seq_len=60"],
        ["parallel.tp=4", "parallel.cp=2", "parallel.sequence_parallel=true"],
        8,
        GPT,
    ),
    (
        "MZ057",
        "parallel.schedule",
        [*STAGES, "train.accumulation_steps=2", "parallel.pp=4"],
        [*STAGES, "train.accumulation_steps=4", "parallel.pp=4"],
        4,
        GPT,
    ),
    (
        "MZ057",
        "parallel.schedule",
        [STAGES[0], "parallel.pp=2", "train.accumulation_steps=4"],
        [*STAGES, "parallel.pp=2", "train.accumulation_steps=4"],
        2,
        GPT,
    ),
    (
        "MZ057",
        "train.rampup_start",
        [*STAGES, "parallel.pp=2", "train.accumulation_steps=4", RAMPUP % (2, 6)],
        [*STAGES, "parallel.pp=2", "train.accumulation_steps=4", RAMPUP % (4, 4)],
        2,
        GPT,
    ),
    ("MZ057", "parallel.schedule", ["parallel.schedule=1f1B"], ["parallel.schedule=1f1b"], 1, GPT),
    (
        "MZ057",
        "parallel.schedule",
        [f"parallel.schedule={WRONG_ORDER}", "parallel.pp=2", "train.accumulation_steps=2"],
        [f"parallel.schedule={SCHEDULE}", "parallel.pp=2", "train.accumulation_steps=2"],
        2,
        GPT,
    ),
    (
        "MZ057",
        "parallel.schedule",
        [f"parallel.schedule={SCHEDULE}", "parallel.pp=2", "train.accumulation_steps=4"],
        [f"parallel.schedule={SCHEDULE}", "parallel.pp=2", "train.accumulation_steps=2"],
        2,
        GPT,
    ),
    ("MZ057", "parallel.schedule", [f"parallel.schedule={SCHEDULE}"], [], 1, GPT),
    (
        "MZ057",
        "parallel.schedule",
        ["parallel.schedule=missing.csv", "parallel.pp=2"],
        ["parallel.pp=2"],
        2,
        GPT,
    ),
    (
        "MZ058",
        "parallel.stage_layers",
        ["parallel.pp=2", "parallel.stage_layers=[2, 1]"],
        ["parallel.pp=2", "parallel.stage_layers=[4, 0]"],
        2,
        GPT,
    ),
    (
        "MZ058",
        "parallel.stage_layers",
        [*STAGES, "parallel.pp=2", "train.accumulation_steps=4", "parallel.stage_layers=[2, 2]"],
        [*STAGES, "parallel.pp=2", "train.accumulation_steps=4", "parallel.stage_layers=[1, 1, 0, 2]"],
        2,
        GPT,
    ),
    (
        "MZ058",
        "parallel.stage_balance",
        ["parallel.pp=2", "parallel.stage_layers=[2, 2]", "parallel.stage_balance=time"],
        ["parallel.pp=2", "parallel.stage_balance=time"],
        2,
        GPT,
    ),
    ("MZ014", "parallel.stage_layers", ["parallel.stage_layers=[4]"], [], 1, GPT),
    (
        "MZ059",
        "memory.recompute",
        ["parallel.pp=2", "memory.recompute=sqrt"],
        ["parallel.pp=2", "memory.recompute=full"],
        2,
        GPT,
    ),
    (
        "MZ063",
        "offload.params",
        ["offload.params=cpu", "parallel.zero_stage=2"],
        ["offload.params=cpu", "parallel.zero_stage=3"],
        2,
        GPT,
    ),
    (
        "MZ064",
        "offload.nvme_path",
        ["offload.optimizer=nvme"],
        ["offload.optimizer=nvme", "offload.nvme_path=x"],
        1,
        GPT,
    ),
    (
        "MZ065",
        "precision.compute",
        ["precision.policy=bf16", "precision.compute=fp32"],
        ["precision.policy=fp32", "precision.compute=bf16"],
        1,
        GPT,
    ),
    (
        "MZ065",
        "precision.policy",
        ["precision.policy=bf16", "precision.reduce=fp16"],
        ["precision.policy=bf16", "precision.reduce=bf16"],
        1,
        GPT,
    ),
    (
        "MZ066",
        "precision.loss_scale",
        ["precision.policy=fp16", "precision.loss_scale=none"],
        ["precision.policy=fp16"],
        1,
        GPT,
    ),
    (
        "MZ067",
        "precision.initial_scale",
        ["precision.policy=fp16", "precision.initial_scale=1", "precision.min_scale=2"],
        ["precision.policy=fp16", "precision.initial_scale=2", "precision.min_scale=2"],
        1,
        GPT,
    ),
    (
        "MZ068",
        "memory.budget_gb",
        ["memory.recompute=budget"],
        ["memory.recompute=budget", "memory.budget_gb=1"],
        1,
        GPT,
    ),
    ("MZ070", "hardware.device", ["hardware.device=cpuu"], ["hardware.device=cpu"], 1, GPT),
    (
        "MZ071",
        "hardware.device",
        ["hardware.device=ascend-910b3"],
        ["hardware.device=ascend-910b3", "hardware.target=Ascend"],
        1,
        GPT,
    ),
    (
        "MZ069",
        "model.dropout",
        [*AUTO_PARALLEL, "parallel.tp=2", "model.dropout=0.1"],
        [*ON_910B2, "parallel.tp=2", "model.dropout=0.1"],
        2,
        GPT,
    ),
    ("MZ069", "precision.compute", ["engine=graph", "precision.policy=bf16"], ["engine=graph"], 1, GPT),
    (
        "MZ069",
        "data.reset_positions",
        ["engine=graph", "data.reset_positions=true"],
        ["data.reset_positions=true"],
        1,
        MIXTRAL,
    ),
    ("MZ069", "parallel.ep", ["engine=graph", "parallel.ep=2"], ["parallel.ep=2"], 2, MIXTRAL),
    ("MZ069", "precision.compute", ["engine=graph", "precision.policy=fp16"], ["engine=graph"], 1, MIXTRAL),
    (
        "MZ078",
        "model.router_bias",
        [*AUTO_PARALLEL, "parallel.ep=2"],
        [*ON_910B2, "parallel.ep=2"],
        2,
        DEEPSEEK,
    ),
    (
        "MZ078",
        "parallel.dp_replicate",
        [*AUTO_PARALLEL, "parallel.dp_replicate=2", "parallel.ep=2", "parallel.zero_stage=1"],
        [*ON_910B2, "parallel.dp_replicate=2", "parallel.ep=2", "parallel.zero_stage=1"],
        4,
        MIXTRAL,
    ),
    (
        "MZ069",
        "train.eval_interval",
        ["engine=graph", *ON_910B2, "parallel.tp=2", "train.eval_interval=5"],
        ["parallel.tp=2", "train.eval_interval=5", *ON_910B2],
        2,
        GPT,
    ),
    (
        "MZ078",
        "train.accumulation_steps",
        [*AUTO_PARALLEL, "parallel.pp=2", "parallel.schedule=zb-v", "train.accumulation_steps=2"],
        [*ON_910B2, "parallel.pp=2", "train.accumulation_steps=2"],
        2,
        GPT,
    ),
    (
        "MZ078",
        "train.accumulation_steps",
        [*AUTO_PARALLEL, "parallel.pp=2"],
        [*ON_910B2, "parallel.pp=2"],
        2,
        GPT,
    ),
    (
        "MZ078",
        "parallel.zero_stage",
        [*AUTO_PARALLEL, "parallel.dp_shard=1", "parallel.dp_replicate=2", "parallel.zero_stage=1"],
        [*ON_910B2, "parallel.dp_shard=1", "parallel.dp_replicate=2", "parallel.zero_stage=1"],
        2,
        GPT,
    ),
    (
        "MZ078",
        "memory.recompute",
        [*AUTO_PARALLEL, "parallel.zero_stage=3", "train.accumulation_steps=2", "memory.recompute=full"],
        [*ON_910B2, "parallel.zero_stage=3", "train.accumulation_steps=2", "memory.recompute=full"],
        2,
        GPT,
    ),
    (
        "MZ078",
        "parallel.stage_layers",
        [*AUTO_PARALLEL, *PARTS_OF_SEQUENCES, "parallel.stage_layers=[0, 4]"],
        [*ON_910B2, "parallel.pp=2", "parallel.stage_layers=[0, 4]"],
        2,
        GPT,
    ),
    (
        "MZ078",
        "parallel.sequence_parts",
        [*AUTO_PARALLEL, *PARTS_OF_SEQUENCES, "parallel.sequence_parts=3"],
        [*ON_910B2, "parallel.pp=2"],
        2,
        GPT,
    ),
    (
        "MZ078",
        "memory.recompute",
        [*AUTO_PARALLEL, *PARTS_OF_SEQUENCES, "memory.recompute=full"],
        [*ON_910B2, "parallel.pp=2", "memory.recompute=full"],
        2,
        GPT,
    ),
    (
        "MZ078",
        "data.reset_attention",
        [*AUTO_PARALLEL, *PARTS_OF_SEQUENCES, "data.reset_attention=true"],
        [*ON_910B2, "parallel.pp=2", "data.reset_attention=true"],
        2,
        GPT,
    ),
    (
        "MZ078",
        "parallel.micro_batch_interleave",
        [*AUTO_PARALLEL, "parallel.zero_stage=1", "parallel.micro_batch_interleave=2"],
        [*ON_910B2, "parallel.zero_stage=1"],
        2,
        GPT,
    ),
    ("MZ086", "parallel.schedule", ["parallel.pp=2", "parallel.schedule=zb-v"], ["parallel.pp=2"], 2, GPT),
    (
        "MZ086",
        "parallel.micro_batch_interleave",
        ["parallel.tp=2", "parallel.micro_batch_interleave=2"],
        ["parallel.tp=2"],
        2,
        GPT,
    ),
    (
        "MZ078",
        "parallel.reshard_after_forward",
        [*AUTO_PARALLEL, "parallel.zero_stage=3", "parallel.reshard_after_forward=false"],
        [*ON_910B2, "parallel.zero_stage=3", "parallel.reshard_after_forward=false"],
        2,
        GPT,
    ),
    (
        "MZ078",
        "parallel.sync_each_microbatch",
        [*AUTO_PARALLEL, "parallel.zero_stage=1", "parallel.sync_each_microbatch=true"],
        [*ON_910B2, "parallel.zero_stage=1", "parallel.sync_each_microbatch=true"],
        2,
        GPT,
    ),
    (
        "MZ078",
        "parallel.schedule",
        [*AUTO_PARALLEL, *STAGES_2, "parallel.schedule=zb-h1"],
        [*ON_910B2, "parallel.pp=2", "parallel.schedule=zb-h1"],
        2,
        LLAMA,
    ),
    (
        "MZ078",
        "model.num_heads",
        [*AUTO_PARALLEL, "parallel.tp=2", "precision.policy=bf16", "model.hidden_size=48"],
        [*ON_910B2, "parallel.tp=2", "precision.policy=bf16", "model.hidden_size=48"],
        2,
        GPT,
    ),
    ("MZ079", "engine.kind", ["engine=graph", *ON_910B2], ON_910B2, 1, GPT),
    ("MZ069", "parallel.tp", ["engine.kind=graph", "parallel.tp=2"], ["parallel.tp=2"], 2, GPT),
    ("MZ069", "parallel.cp", ["engine.kind=graph", "parallel.cp=2"], ["parallel.cp=2"], 2, GPT),
    (
        "MZ078",
        "precision.compute",
        [*AUTO_PARALLEL, "parallel.cp=2", "precision.policy=fp32"],
        [*ON_910B2, "parallel.cp=2", "precision.policy=fp32"],
        2,
        GPT_MICRO_1,
    ),
    (
        "MZ078",
        "train.micro_batch_size",
        [*AUTO_PARALLEL, "parallel.cp=2", "train.micro_batch_size=2", "precision.policy=bf16"],
        [*ON_910B2, "parallel.cp=2", "train.micro_batch_size=2", "precision.policy=bf16"],
        2,
        GPT_MICRO_1,
    ),
    ("MZ069", "parallel.zero_stage", ["engine=graph", "parallel.zero_stage=1"], ["engine=graph"], 2, GPT),
    ("MZ069", "memory.recompute", ["engine=graph", "memory.recompute=full"], ["engine=eager"], 1, GPT),
    (
        "MZ073",
        "hardware.kernels",
        ["hardware.kernels=custom"],
        ["hardware.kernels=custom", "hardware.target=Ascend", "hardware.device=ascend-910b3"],
        1,
        GPT,
    ),
    (
        "MZ073",
        "hardware.kernels",
        ["hardware.kernels=portable", "hardware.target=Ascend", "hardware.device=ascend-910b3"],
        ["hardware.kernels=portable"],
        1,
        GPT,
    ),
    (
        "MZ072",
        "hardware.device",
        ["hardware.target=GPU"],
        ["hardware.target=GPU", "hardware.device=nvidia-h100-sxm"],
        1,
        GPT,
    ),
]


@pytest.mark.parametrize(
    ("rule", "key", "violating", "fitting", "world", "text"),
    CASES,
    ids=[f"{case[0]}-{case[1]}" for case in CASES],
)
def test_a_rule_finds_its_violation_and_nothing_next_to_it(
    load, refused, rule, key, violating, fitting, world, text
):
    if EXPLANATIONS[rule].severity != "warning":
        findings = refused(*violating, world=world, text=text)
    else:
        findings = load(*violating, world=world, text=text).warnings
    assert [(finding.rule, finding.path) for finding in findings] == [(rule, key)]
    assert findings[0].severity == EXPLANATIONS[rule].severity
    assert load(*fitting, world=world, text=text).warnings == ()


def test_a_wrong_schedule_is_refused_with_the_action_and_the_rule(refused):
    overrides = [f"parallel.schedule={WRONG_ORDER}", "parallel.pp=2", "train.accumulation_steps=2"]
    (finding,) = refused(*overrides, world=2, text=GPT)
    assert finding.message == "schedule wrong_order.csv, rank 1: 1B1 comes before 1F1"
    (finding,) = refused("parallel.schedule=1f1B", text=GPT)
    assert finding.message.endswith("or the path of a .csv file; did you mean 1f1b?")
    (finding,) = refused("parallel.schedule=zzzz", text=GPT)
    assert finding.message.endswith("or the path of a .csv file")


def test_a_rule_waits_for_the_values_that_it_reads(refused):
    on_ascend = ["engine=graph", "hardware.target=Ascend", "precision.policy=bf16", "parallel.pp=2"]
    on_ascend += ["train.accumulation_steps=2", "parallel.schedule=seqpipe", "parallel.sequence_parts=0"]
    assert {finding.path for finding in refused(*on_ascend, world=2, text=GPT)} == {"parallel.sequence_parts"}
    unknown = ["train.global_batch_size=auto", "train.micro_batch_size=auto", "train.accumulation_steps=4"]
    (finding,) = refused(*unknown, "parallel.pp=2", world=2, text=GPT)
    assert finding.path == "train"


def test_every_rule_has_a_case():
    assert {case[0] for case in CASES} == {rule.id for rule in RULES}


def test_every_id_in_the_code_is_explained_once():
    sources = [path.read_text() for path in Path(inspect.getfile(config)).parent.glob("*.py")]
    used = set(re.findall(r'"(MZ\d{3})"', "".join(sources)))
    assert used == set(EXPLANATIONS)
    assert len(RULES) == len({rule.id for rule in RULES})


def test_explanations_say_why_and_what_to_do():
    for entry in EXPLANATIONS.values():
        assert entry.title and not entry.title.endswith(".")
        assert entry.explanation.endswith(".") and len(entry.explanation) > 40
        assert entry.fix.endswith(".")


def test_rules_read_keys_that_exist():
    keys = {f"model.{name}" for family in schema.MODEL_FAMILIES.values() for name in schema.keys_of(family)}
    keys |= {f"model.rope_scaling.{name}" for name in schema.keys_of(schema.RopeScaling)}
    keys |= {f"model.latent.{name}" for name in schema.keys_of(schema.LatentConfig)}
    for section, owner in schema.SECTIONS.items():
        keys |= {f"{section}.{name}" for name in schema.keys_of(owner)}
    for rule in RULES:
        assert set(rule.reads) <= keys, rule.id


def test_the_table_of_tokenizers_agrees_with_the_tokenizers():
    from ms_zero.config.tokenizers import VOCAB_SIZES
    from ms_zero.data import get_tokenizer

    for name, size in VOCAB_SIZES.items():
        assert get_tokenizer(name).vocab_size == size
