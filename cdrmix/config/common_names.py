"""Names that other trainers give to keys of the configuration, for messages about unknown keys."""

from __future__ import annotations

_OF_KEY = {
    "training.learning_rate": "lr max_lr peak_lr base_lr learningrate",
    "training.min_learning_rate": "min_lr lr_min lr_end end_lr",
    "training.schedule": "lr_scheduler_type lr_scheduler lr_decay_style lr_schedule scheduler",
    "training.cooldown_fraction": "decay_fraction lr_wsd_decay_fraction cooldown_ratio",
    "training.warmup_steps": "warmup warmup_iters warmup_num_steps lr_warmup_steps "
    "num_warmup_steps",
    "training.global_batch_size": "batch_size train_batch_size gbs bs",
    "training.micro_batch_size": "mbs micro_batch per_device_train_batch_size "
    "train_micro_batch_size_per_gpu device_batch_size",
    "training.sequence_length": "seq_len seq_length max_seq_len max_seq_length block_size "
    "context_length n_ctx ctx_len max_position_embeddings",
    "training.max_steps": "max_iters num_steps train_iters max_train_steps num_iterations steps "
    "total_steps",
    "training.total_tokens": "max_tokens_total train_tokens",
    "training.weight_decay": "wd decay_weight",
    "training.gradient_clipping": "grad_clip clip_grad max_grad_norm gradient_clip_val",
    "training.precision": "dtype torch_dtype mixed_precision",
    "training.beta1": "adam_beta1",
    "training.beta2": "adam_beta2",
    "training.epsilon": "eps adam_eps adam_epsilon",
    "training.activation_checkpointing": "gradient_checkpointing grad_checkpointing recompute",
    "training.compile": "torch_compile compile_model use_compile",
    "model.num_layers": "n_layer n_layers num_hidden_layers",
    "model.num_heads": "n_head n_heads num_attention_heads",
    "model.num_kv_heads": "n_kv_heads num_key_value_heads",
    "model.hidden_size": "n_embd d_model",
    "model.ffn_hidden_size": "intermediate_size d_ff ffn_dim",
    "model.vocab_size": "n_vocab vocabulary_size padded_vocab_size",
    "model.moe.num_experts": "n_experts num_local_experts",
    "model.moe.top_k": "num_experts_per_tok moe_router_topk",
    "parallel.data": "dp dp_size data_parallel_size",
    "parallel.tensor": "tp tp_size tensor_parallel_size tensor_model_parallel_size",
    "parallel.pipeline": "pp pp_size pipeline_parallel_size pipeline_model_parallel_size",
    "parallel.sequence": "sp sp_size cp context_parallel_size",
    "parallel.expert": "ep ep_size expert_parallel_size expert_model_parallel_size",
    "data.path": "dataset data_path data_dir dataset_path",
    "checkpoint.every_steps": "save_steps save_interval save_every",
    "checkpoint.keep": "save_total_limit keep_last max_checkpoints",
    "evaluation.every_steps": "eval_steps eval_interval eval_every",
    "monitoring.log_every_steps": "log_interval logging_steps log_every",
}
COMMON_NAMES = {name: key for key, names in _OF_KEY.items() for name in names.split()}
"""Dotted path of the key that a name of another trainer, in lower case, stands for."""
