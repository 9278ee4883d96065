"""The arguments of vLLM's engine that this one lacks: without effect here, or not served.

Each of vLLM's is accepted with its default, so that a script may pass all of them.

In vLLM v0.33.0: `EngineArgs` in `vllm/engine/arg_utils.py`, `LLM.__init__` in `vllm/entrypoints/llm.py`.
"""

from minivllm.config.vllm_arguments import ANY_VALUE, not_served

HARMLESS = (
    # how weights and tokenizers are found and loaded
    "download_dir", "hf_token", "ignore_patterns", "max_parallel_loading_workers", "model_loader_extra_config",
    "pt_load_map_location", "revision", "code_revision", "safetensors_load_strategy", "safetensors_prefetch_block_size",
    "safetensors_prefetch_num_threads", "tokenizer_mode", "tokenizer_revision", "trust_remote_code", "use_tqdm_on_load",
    # speed of kernels, graphs and collectives
    "attention_config", "compilation_config", "cudagraph_capture_sizes", "disable_cascade_attn",
    "disable_custom_all_reduce", "enable_batch_sharded_sampling", "enable_flashinfer_autotune",
    "enable_shm_tensor_arena", "gdn_prefill_backend", "ir_op_priority", "jit_monitor_mode", "jit_monitor_verbose",
    "kda_decode_backend", "kda_prefill_backend", "kernel_config", "linear_backend", "max_cudagraph_capture_size",
    "max_seq_len_to_capture", "monokernel", "numa_bind", "numa_bind_cpus", "numa_bind_nodes", "optimization_level",
    "performance_mode", "prefix_caching_hash_algo", "ray_workers_use_nsight", "renderer_num_workers", "swap_space",
    # logs and metrics
    "aggregate_engine_logging", "collect_detailed_traces", "cudagraph_metrics", "disable_log_requests",
    "enable_layerwise_nvtx_tracing", "enable_log_requests", "enable_logging_iteration_details", "enable_mfu_metrics",
    "enable_mm_processor_stats", "kv_cache_metrics", "kv_cache_metrics_sample", "log_config_file", "log_level",
    "logging_config", "per_request_spec_decode_metrics", "show_hidden_metrics_for_version",
    # limits of what is not there: media, adapters, experts, state-space layers, several machines
    "all2all_backend", "allowed_local_media_path", "allowed_media_domains", "cpu_distributed_timeout_seconds",
    "dbo_decode_token_threshold", "dbo_prefill_token_threshold", "dcp_comm_backend", "dcp_kv_cache_interleave_size",
    "dcp_q_replicate", "default_mm_loras", "disable_chunked_mm_input", "disable_hybrid_kv_cache_manager",
    "disable_nccl_for_dp_synchronization", "distributed_timeout_seconds", "dp_sync_interval", "ec_manager_config",
    "elastic_ep_max_dp_size", "enable_ep_weight_filter", "enable_mamba_cache_stochastic_rounding",
    "enable_mamba_shared_prefix_checkpoint", "enable_mixed_moe_lora_format", "enable_mm_embeds",
    "enable_moe_shared_loras", "enable_nccl_comm_suspend", "enable_tower_connector_lora", "eplb_config",
    "expert_placement_strategy", "fault_tolerance_config", "fully_sharded_loras", "interleave_mm_strings",
    "language_model_only", "limit_mm_per_prompt", "lora_target_modules",
    "mamba_backend", "mamba_block_size", "mamba_cache_dtype", "mamba_cache_mode", "mamba_cache_philox_rounds",
    "mamba_config", "mamba_ssm_cache_dtype", "mamba_ssu_algorithm", "master_addr", "master_port",
    "max_lora_cls_labels", "media_io_kwargs", "mm_device_do_normalize",
    "mm_encoder_attn_backend", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path",
    "mm_encoder_fp8_scale_save_margin", "mm_encoder_fp8_scale_save_path", "mm_encoder_tp_mode", "mm_hasher_algorithm",
    "mm_ipc_gpu_memory_gb", "mm_processor_cache_gb", "mm_processor_cache_type", "mm_processor_device",
    "mm_processor_kwargs", "mm_shm_cache_max_object_size_mb", "mm_tensor_ipc", "moe_backend", "offload_backend",
    "replayssm_buffer_len", "skip_mm_profiling", "sleep_mode_backend", "sleep_mode_offload_cudagraph",
    "sleep_preserve_parameter_names", "sparse_indexer_topk_backend", "specialize_active_lora", "swa_bounded_replay",
    "ubatch_size", "use_replayssm", "video_pruning_method", "video_pruning_rate", "watchdog_config",
    # guards of vLLM's own
    "allow_deprecated_quantization", "fail_on_environ_validation", "max_logprobs", "shutdown_timeout",
)  # fmt: skip
WITHOUT_EFFECT = {
    **dict.fromkeys(HARMLESS, ANY_VALUE),
    "config_format": ("auto", "hf"),
    "decode_context_parallel_size": (1,),
    "generation_config": ("auto",),
    "prefill_context_parallel_size": (1,),
    "runner": ("auto", "generate"),
    "structured_outputs_config": ({}, {"backend": "auto"}, {"backend": "guidance"}),
    "task": ("auto", "generate"),
}
NOT_SERVED = not_served(
    {
        "models that embed, score or classify": {"convert": "auto", "pooler_config": None, "io_processor_plugin": None},
        "mixtures of experts": {
            "enable_expert_parallel": False, "enable_eplb": False, "enable_elastic_ep": False, "enable_dbo": False,
            "enable_return_routed_experts": False,
        },
        "encoders of images or sound": {"mm_encoder_only": False},
        "models of other kinds than decoders": {"diffusion_config": None, "engram_config": None},
        "adapters without a server": {"lora_modules": None},
        "several machines": {"nnodes": 1, "node_rank": 0, "device_ids": None},
        "replicas of an engine": {
            "data_parallel_rank": None, "data_parallel_start_rank": None, "data_parallel_size_local": None,
            "data_parallel_address": None, "data_parallel_rpc_port": None, "data_parallel_hybrid_lb": False,
            "data_parallel_external_lb": False, "data_parallel_multi_port_external_lb": False,
        },
        "context parallelism": {"cp_kv_cache_interleave_size": None, "enable_hc_sp": False},
        "another memory for weights": {
            "cpu_offload_gb": 0, "cpu_offload_params": None, "offload_group_size": 0, "offload_num_in_group": 1,
            "offload_params": None, "offload_prefetch_step": 1, "enable_sleep_mode": False,
            "enable_cumem_allocator": False,
        },
        "another memory for the KV cache": {
            "kv_events_config": None, "ec_transfer_config": None,
        },
        "a size of the KV cache in bytes; give num_gpu_blocks_override": {"kv_cache_memory_bytes": None},
        "a KV cache of several kinds": {
            "kv_cache_dtype_skip_layers": None, "kv_sharing_fast_prefill": False, "prefix_match_unit": None,
            "prefix_cache_retention_interval": 0, "disable_sliding_window": False,
        },
        "prompts as embeddings": {"enable_prompt_embeds": False},
        "other code in the engine; parts=Parts(...) replaces its parts": {
            "logits_processors": None, "model_impl": "auto", "model_class_overrides": None, "scheduler_cls": None,
            "worker_cls": "auto", "worker_extension_cls": "", "additional_config": None, "aux_output_config": None,
        },
        "other configs than the model's own": {
            "hf_config_path": None, "hf_overrides": None, "model_weights": "", "override_generation_config": None,
            "quantization_config": None, "quantization_param_path": None, "override_pooler_config": None,
        },
        "other log probabilities than the model's own": {"logprobs_mode": "raw_logprobs"},
        "sampling of this kind": {
            "enable_trace_replay": False, "return_sampling_mask": False, "use_fp64_gumbel": False,
            "watermark_config": None,
        },
        "reasoning set apart from the answer": {
            "reasoning_config": None, "reasoning_parser": "", "reasoning_parser_plugin": None,
        },
        "this limit of the scheduler": {
            "max_num_active_seqs": None, "max_num_scheduled_tokens": None, "prefill_schedule_interval": 1,
            "stream_interval": 1,
        },
        "a limit of the queue without a server": {"max_num_queued_reqs": None, "max_num_queued_tokens": None},
        "traces to a collector": {"otlp_traces_endpoint": None},
        "another name without a server": {"served_model_name": None},
        "other buckets of histograms": {"custom_histogram_buckets": None},
        "weights that change, or engines that heal": {
            "enable_fault_tolerance": False, "weight_transfer_config": None,
        },
        "an engine without texts; skip_tokenizer_init is nearest": {"tokens_only": False},
    }
)  # fmt: skip
