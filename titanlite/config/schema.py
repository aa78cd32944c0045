"""The configuration schema: one dataclass per TOML section, with the names of torchtitan's TOML
files.

`docs/config.md` is generated from it. No heavy package is imported, so that a wrong configuration
is refused at once.
"""

from dataclasses import dataclass
from typing import Literal

from titanlite.config.data import DataSection
from titanlite.config.model import ModelSection, setting


@dataclass
class JobSection:
    dump_folder: str = setting(
        "outputs", "Folder of this run. Not set: outputs/NAME, for a configuration file NAME.toml."
    )
    description: str = setting("", "Free text, printed at the start and saved with the run.")
    stop_grace_seconds: int = setting(
        0, "Seconds after SIGTERM or SIGINT to finish the step and save; 0: no limit."
    )


@dataclass
class TrainingSection:
    steps: int = setting(1000, "Optimizer steps to run, unless epochs is set.")
    epochs: float = setting(
        0.0,
        "Passes over the data, instead of steps. If neither is set: 3, with pretrained weights "
        "and data that end.",
    )
    objective: str = setting(
        "next_token",
        "'next_token': cross entropy of the labels; 'dpo': direct preference optimization on "
        "pairs (arXiv:2305.18290); or a loss of your own (docs/extending.md).",
        choices=("next_token", "dpo"),
        calls=("logits, labels", "log_probs, batch", "job"),
    )
    seq_len: int = setting(
        2048, "Tokens per sequence. -1: 2048, or the model's limit if less.", ge=1, also=-1
    )
    local_batch_size: int = setting(
        0,
        "Sequences per data-parallel rank and micro-batch. 0: chosen for the GPUs (docs/plan.md), "
        "within the batch of a step; 1 on CPU.",
        ge=1,
        also=0,
    )
    global_batch_size: int | None = setting(
        -1,
        "Sequences per optimizer step. -1: local_batch_size (1 if that is chosen) * data-parallel "
        "degree. Not set, in fine-tuning: about 16 examples (QLoRA, arXiv:2305.14314), in DPO 32 "
        "pairs (Zephyr, arXiv:2310.16944), but at most 1/32 of the data and at least one "
        "micro-batch per rank; a resumed run keeps its batch.",
        ge=1,
        also=-1,
    )
    max_norm: float = setting(1.0, "Gradients are clipped to this total 2-norm; 0: no clipping.")
    dtype: Literal["float32", "bfloat16"] = setting(
        "float32",
        "Dtype of stored parameters, gradients and states. 'bfloat16' loses updates below 1/256 "
        "of a weight.",
    )
    mixed_precision_param: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "Dtype of parameters and activations in forward and backward; 'auto': bfloat16 on CUDA, "
        "training.dtype on CPU.",
    )
    mixed_precision_reduce: Literal["float32", "bfloat16"] = setting(
        "float32", "Dtype of the gradient reduction."
    )
    enable_cpu_offload: bool = setting(
        False, "Keep parameters and optimizer states in host memory (CUDA only)."
    )
    loss_chunk_tokens: int = setting(
        0,
        "Tokens per chunk of the output projection and loss. 0: 4096 with titanlite's kernels on "
        "CUDA, 1024 without.",
    )
    triton_kernels: bool = setting(
        True, "Use titanlite's Triton kernels on CUDA; they need a C compiler there."
    )
    seed: int = setting(
        42, "Seed of weights and data order. The same seed gives the same weights on any mesh."
    )
    deterministic: bool = setting(
        False,
        "Every run on the same mesh gives the same bits, also after a resume. On CUDA this is "
        "slower and takes more memory.",
    )
    on_nonfinite: Literal["stop", "skip"] = setting(
        "stop",
        "A step with a loss or gradient that is not finite is never applied. 'stop': save, and "
        "end with the cause. 'skip': warn, and continue.",
    )
    max_nonfinite_steps: int = setting(
        10, "With on_nonfinite = 'skip': end after this many such steps in a row.", ge=1
    )


@dataclass
class OptimizerSection:
    name: str = setting(
        "AdamW",
        "'AdamW' (arXiv:1711.05101). 'Muon' (arXiv:2502.16982): orthogonalized momentum for "
        "matrices, AdamW for the rest, with the same rate and decay. Or your own "
        "(docs/extending.md).",
        choices=("AdamW", "Muon"),
        calls=("named_parameters, section",),
    )
    lr: float = setting(
        3e-4,
        "Peak learning rate. Not set with pretrained weights: 2e-5, LoRA 2e-4, DPO 5e-7, both "
        "5e-6.",
        gt=0,
        le=1,
    )
    beta1: float = setting(0.9, "Decay of the first moment.", lt=1)
    beta2: float = setting(
        0.95, "Decay of the second moment. Not set, with pretrained weights: 0.999.", lt=1
    )
    eps: float = setting(1e-8, "Added to the root of the second moment.", gt=0)
    momentum: float = setting(
        0.95, "Nesterov momentum of Muon's matrices.", lt=1, only_for='optimizer.name = "Muon"'
    )
    weight_decay: float = setting(
        0.1,
        "Decoupled weight decay of matrices; norms and biases have none. Not set, with pretrained "
        "weights: 0.",
    )
    implementation: Literal["fused", "foreach", "for-loop"] = setting(
        "fused", "Kernel of the optimizer step.", only_for='optimizer.state_dtype = "float32"'
    )
    state_dtype: Literal["float32", "bfloat16"] = setting(
        "float32",
        "Dtype of AdamW's moments. 'bfloat16' halves their memory; the moments, and weights in "
        "bfloat16, are then rounded stochastically, with the same bits on any mesh.",
        only_for='optimizer.name = "AdamW"',
    )
    freeze: str = setting(
        "",
        "Parameters not to train: shell patterns over names, such as 'model.embed_tokens*, "
        "*.mlp.gate.*'.",
        is_list=True,
    )
    lr_multipliers: str = setting(
        "",
        "Factors on the learning rate, such as 'lm_head*=2, *.experts.*=0.5'. The last pattern "
        "that matches counts.",
        is_list=True,
    )


BLOCK_SIZES = {"fp8": 128, "nf4": 64, "mxfp4": 32}
"""Values of a row that share a scale, for each `lora.base_dtype` that is not a torch dtype."""


@dataclass
class LoRASection:
    rank: int = setting(
        0,
        "Rank of the adapters (LoRA, arXiv:2106.09685) that are trained instead of the model. 0: "
        "none.",
    )
    alpha: float = setting(16.0, "Adapters are scaled by alpha / rank.", gt=0)
    dropout: float = setting(0.0, "Dropout on the input of the adapters.", lt=1)
    targets: str = setting(
        "",
        "Layers that get an adapter: patterns that match a name or its end, such as 'q_proj, "
        "v_proj, experts'. Empty: all linear layers in decoder layers, and the experts.",
        is_list=True,
    )
    init_from: str = setting(
        "",
        "Folder or hub id of peft adapters to begin with, of the same rank, scaling and layers. "
        "Empty: new adapters.",
    )
    use_rslora: bool = setting(
        False, "Scale by alpha / sqrt(rank) instead of alpha / rank (arXiv:2312.03732)."
    )
    base_dtype: Literal["auto", "float32", "bfloat16", "fp8", "nf4", "mxfp4"] = setting(
        "auto",
        "Dtype of the frozen weights. 'auto': training.mixed_precision_param. 'fp8' (8.25 bits) "
        "and 'nf4' (4.5 bits; QLoRA, arXiv:2305.14314): linear layers and experts in blocks, the "
        "rest as with 'auto'. 'mxfp4' (5 bits): only experts, as in published gpt-oss.",
    )


@dataclass
class DPOSection:
    beta: float = setting(0.1, "Strength of the pull towards the reference model.", gt=0)
    label_smoothing: float = setting(0.0, "Fraction of pairs assumed to be swapped.", lt=0.5)
    reference: Literal["auto", "adapters_off", "cached"] = setting(
        "auto",
        "Where the reference's log-probabilities come from. 'adapters_off': the model without its "
        "adapters, in every step. 'cached': the initial weights, once. 'auto': 'adapters_off' "
        "with new adapters, otherwise 'cached'.",
    )


@dataclass
class LRSchedulerSection:
    warmup_steps: int = setting(
        -1,
        "Steps of linear warm-up, from 1 / warmup_steps of the peak. -1: 3% of the run's steps, "
        "at most 200.",
        ge=-1,
    )
    decay_ratio: float | None = setting(
        None,
        "Fraction of all steps for the final decay (WSD). Not set: it begins after the warm-up.",
        gt=0,
        le=1,
    )
    decay_type: Literal["linear", "sqrt", "cosine"] = setting("cosine", "Shape of the decay.")
    min_lr_factor: float = setting(
        0.1, "Learning rate at the end, as a factor of optimizer.lr.", le=1
    )


@dataclass
class ParallelismSection:
    data_parallel_replicate_degree: int = setting(
        0,
        "Replicas of the sharded model (HSDP; DDP if not sharded). 0: chosen for the GPUs; 1 on "
        "CPU.",
        ge=1,
        also=0,
    )
    data_parallel_shard_degree: int = setting(
        -1,
        "Ranks that the parameters are sharded over (FSDP2); -1: the remaining ranks.",
        ge=1,
        also=-1,
    )
    tensor_parallel_degree: int = setting(
        1, "Ranks that split dense layers, and sequences between layers.", ge=1
    )
    context_parallel_degree: int = setting(
        0,
        "Ranks that split sequences, and heads in attention (arXiv:2309.14509). FSDP shards over "
        "them too. 0: chosen for the GPUs, more than 1 if nothing else fits; 1 on CPU.",
        ge=1,
        also=0,
    )
    pipeline_parallel_degree: int = setting(
        1,
        "Pipeline stages, each with some of the layers (1F1B, arXiv:2104.04473). The other "
        "degrees count the ranks of one stage.",
        ge=1,
    )
    pipeline_parallel_layers: str = setting(
        "",
        "Layers of each stage, such as '11,13,13,11'. Empty: an even split.",
        is_list=True,
        only_for="parallelism.pipeline_parallel_degree > 1",
    )
    expert_parallel_degree: int = setting(
        0,
        "Ranks that split the experts: some of data_parallel_shard * context_parallel * "
        "tensor_parallel. 0: chosen for the GPUs; 1 on CPU.",
        ge=1,
        also=0,
    )
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = setting(
        "default",
        "Free gathered parameters after forward; 'default': in all but the last layer. With one "
        "rank, 'always' casts parameters layer by layer; the other values keep copies in the "
        "matmuls' dtype, which cost 2 bytes per parameter and save half of the host's work.",
    )
    fsdp_once_per_step: bool = setting(
        False,
        "Gather parameters and reduce gradients once per step, not per micro-batch: less traffic, "
        "more memory.",
    )


@dataclass
class MoESection:
    grouped_gemm: Literal["auto", "triton", "torch"] = setting(
        "auto",
        "Backend of the expert matmuls. 'torch': grouped_mm on CUDA, a loop on CPU. 'auto': "
        "'triton', titanlite's fused kernels, on CUDA, 'torch' on CPU.",
    )
    expert_bias_update_rate: float | None = setting(
        None,
        "Step of the balancing bias (arXiv:2408.15664). Not set: 1e-3 if a native architecture "
        "has it, otherwise 0. A transformers class with one is balanced only if this is set.",
    )
    aux_loss_coeff: float | None = setting(
        None,
        "Coefficient of the sequence-wise balance loss (arXiv:2412.19437, eq. 17). Not set: 0.02 "
        "for a native MoE with random weights and without a balancing bias, otherwise 0; a "
        "resumed run keeps its value.",
    )
    z_loss_coeff: float = setting(
        0.0, "Coefficient of the router z-loss (arXiv:2202.08906, eq. 5)."
    )


@dataclass
class CheckpointSection:
    enable: bool = setting(
        True,
        "Save checkpoints at intervals, at the end and on SIGTERM or SIGINT, and resume from the "
        "latest.",
    )
    folder: str = setting("checkpoint", "Folder of the checkpoints, inside job.dump_folder.")
    timeout_seconds: int = setting(
        7200,
        "Seconds that a rank waits for others while a checkpoint is saved or its checksums are "
        "compared.",
        ge=1,
    )
    interval: int = setting(500, "Optimizer steps between checkpoints; 0: only at the end.")
    initial_load_path: str = setting(
        "",
        "Like model.path, but only for the weights. The sizes come from model.flavor or "
        "model.hf_assets_path.",
    )
    allow_missing_expert_bias: bool = setting(
        False,
        "Begin with zeros if the weights do not have the router's selection bias that their "
        "architecture has.",
    )
    load_step: int = setting(
        -1,
        "Step to resume from; -1: the latest complete checkpoint in the folder, if there is one; "
        "0: start over.",
        ge=-1,
    )
    resume: Literal["auto", "force"] = setting(
        "auto",
        "'auto': resume a run with the same base model, data and objective, and refuse other "
        "runs; 'force': resume any run.",
    )
    keep_latest_k: int = setting(3, "Checkpoints to keep; the oldest is removed first. 0: all.")
    keep_every_n_steps: int = setting(
        0, "Keep every checkpoint whose step is a multiple of this. 0: none."
    )
    async_mode: Literal["disabled", "async"] = setting(
        "disabled",
        "'async': training waits only for a copy in host memory; files are written in the "
        "background.",
    )
    export_dtype: Literal["float32", "bfloat16"] = setting(
        "float32",
        "Dtype of the saved model. Parameters that lose bits are saved separately, for a resume.",
    )
    save_best: Literal["none", "validation", "evaluation"] = setting(
        "none",
        "Also keep the checkpoint with the lowest loss or the highest score; the link 'best' "
        "points to it.",
        only_for="checkpoint.enable = true",
    )
    push_to_hub: str = setting(
        "",
        "Hub repository (owner/name) for the final or best model, private if it is new. Empty: no "
        "upload.",
        only_for="checkpoint.enable = true",
    )
    verify_checksums: bool = setting(
        True,
        "Compare all checksums before a resume; a damaged checkpoint is passed over, and the "
        "previous one is used.",
    )
    on_save_error: Literal["stop", "continue"] = setting(
        "stop",
        "If a checkpoint cannot be written: 'stop' ends the run; 'continue' warns, and tries "
        "again at the next save. The last save must succeed.",
    )


@dataclass
class ActivationCheckpointSection:
    mode: Literal["auto", "none", "full", "keep_attention", "selective"] = setting(
        "auto",
        "'full': recompute every layer in backward; 'keep_attention': all of it except attention's "
        "result; 'selective': see selective_ac_option. 'auto': chosen for the GPUs; 'none' on CPU.",
    )
    selective_ac_option: str = setting(
        "op",
        "'op': save the results of matmuls and attention, recompute the rest; a number N: "
        "recompute every Nth layer.",
        only_for='activation_checkpoint.mode = "selective"',
    )


@dataclass
class CompileSection:
    enable: bool = setting(False, "torch.compile each decoder layer.")


@dataclass
class MetricsSection:
    log_freq: int = setting(10, "Steps between log lines and metric points.", ge=1)
    function: str = setting(
        "",
        "Function that gets the values of a log step, a StepPoint, and returns more values to log "
        "(docs/extending.md).",
        calls=("point", "point, backwards"),
    )
    enable_tensorboard: bool = setting(
        True, "Write TensorBoard events to job.dump_folder/save_tb_folder."
    )
    save_tb_folder: str = setting("tb", "Folder of the TensorBoard events, inside job.dump_folder.")
    enable_wandb: bool = setting(
        False, "Send metrics and configuration to Weights & Biases (pip install wandb)."
    )
    wandb_project: str = setting(
        "titanlite",
        "W&B project; the environment variable WANDB_PROJECT overrides it.",
        only_for="metrics.enable_wandb",
    )
    enable_progress_bar: bool = setting(
        True, "Show a progress bar when standard output is a terminal."
    )


@dataclass
class ProfilingSection:
    enable_profiling: bool = setting(
        False, "Record a torch.profiler trace of one step every profile_freq steps."
    )
    save_traces_folder: str = setting(
        "profile_traces", "Folder of the traces, inside job.dump_folder."
    )
    profile_freq: int = setting(
        100, "Steps between traces.", ge=1, only_for="profiling.enable_profiling"
    )
    enable_memory_snapshot: bool = setting(
        False,
        "Record CUDA's allocations; if memory runs out, write job.dump_folder/memory/rankN.pickle.",
    )


@dataclass
class ValidationSection:
    enable: bool = setting(False, "Compute the validation loss at intervals on held-out sequences.")
    freq: int = setting(
        100, "Steps between validations; also before the first step and after the last.", ge=1
    )
    steps: int = setting(
        0,
        "Limit of global batches per validation and source. 0: every held-out sequence once.",
    )
    early_stopping_patience: int = setting(
        0, "Stop after this many validations in a row without improvement. 0: never."
    )
    early_stopping_min_delta: float = setting(
        0.0, "Smallest decrease of the validation loss that is an improvement."
    )


@dataclass
class EvaluationSection:
    enable: bool = setting(
        False,
        "Generate answers to held-out prompts and score them: before, during and after training.",
    )
    freq: int = setting(500, "Steps between evaluations.", ge=1)
    path: str = setting(
        "", "Examples to evaluate on, like data.path. Empty: the held-out examples."
    )
    split: str = setting(
        "test",
        "Split of evaluation.path, if that is a dataset of the hub.",
        only_for="evaluation.path",
    )
    samples: int = setting(0, "Prompts per evaluation, spread evenly over the examples. 0: all.")
    batch_size: int = setting(16, "Prompts per batch on each data-parallel rank.", ge=1)
    max_new_tokens: int = setting(
        128, "Largest number of new tokens per prompt. Decoding is greedy.", ge=1
    )
    scorer: str = setting(
        "exact_match",
        "'exact_match': equal text, apart from white space at the ends. 'contains': the "
        "reference answer occurs in the generated text. Or your function (prediction, reference) "
        "-> number; higher is better.",
        choices=("exact_match", "contains"),
        calls=("prediction, reference",),
    )


@dataclass
class CommSection:
    timeout_seconds: int = setting(
        300,
        "Hang timeout. If a rank makes no progress while it trains, or a collective of all ranks "
        "takes longer, the run ends or restarts, and names the rank. Collectives along one mesh "
        "axis have torch's limit, 30 minutes.",
        ge=1,
    )


@dataclass
class JobConfig:
    """The whole configuration of a run; `titanlite.config.load_config` returns one."""

    job: JobSection = setting(JobSection)
    model: ModelSection = setting(ModelSection)
    training: TrainingSection = setting(TrainingSection)
    optimizer: OptimizerSection = setting(OptimizerSection)
    lora: LoRASection = setting(LoRASection, only_for="lora.rank")
    dpo: DPOSection = setting(DPOSection, only_for="training.objective")
    lr_scheduler: LRSchedulerSection = setting(LRSchedulerSection)
    parallelism: ParallelismSection = setting(ParallelismSection)
    moe: MoESection = setting(MoESection)
    checkpoint: CheckpointSection = setting(CheckpointSection)
    activation_checkpoint: ActivationCheckpointSection = setting(ActivationCheckpointSection)
    compile: CompileSection = setting(CompileSection, only_for="compile.enable")
    metrics: MetricsSection = setting(MetricsSection)
    profiling: ProfilingSection = setting(ProfilingSection)
    data: DataSection = setting(DataSection)
    validation: ValidationSection = setting(ValidationSection, only_for="validation.enable")
    evaluation: EvaluationSection = setting(EvaluationSection, only_for="evaluation.enable")
    comm: CommSection = setting(CommSection)
