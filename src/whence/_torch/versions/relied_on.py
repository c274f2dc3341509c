"""Everything private of PyTorch that whence relies on: the one list of it.

`tests/_torch/versions/test_relied_on.py` holds it against the source and against the canaries; `import
whence` looks for the names, `whence doctor` for all of it. `|` stands between the names of one thing in
several releases.
"""

NAMES = {
    "torch": """
        _VF _assert _check _check_index _check_not_implemented _check_tensor_all _check_tensor_all_with
        _check_type _check_value _check_with _compile _foreach_copy_ _fused_adagrad_ _fused_adam_
        _fused_adamw_ _fused_sdp_choice _fused_sgd_ _native_multi_head_attention
        _nested_tensor_from_mask _nested_tensor_from_mask_left_aligned _pack_padded_sequence
        _pad_packed_sequence _subclasses _transformer_encoder_layer_fwd
    """,
    "torch._C": """
        DisableTorchFunction DispatchKeySet ScriptMethod _AutoDispatchBelowAutograd _ForceDispatchKeyGuard
        _FunctionBase _InferenceMode _current_graph_task_id _dispatch_has_kernel_for_dispatch_key
        _dispatch_tls_is_dispatch_key_excluded _dispatch_tls_is_dispatch_key_included
        _dispatch_tls_local_exclude_set _dispatch_tls_local_include_set
        _dispatch_tls_set_dispatch_key_excluded _dispatch_tls_set_dispatch_key_included
        _get_cudnn_sdp_enabled _get_flash_sdp_enabled _get_math_sdp_enabled _get_mem_efficient_sdp_enabled
        _get_mkldnn_enabled _get_sdp_priority_order _get_torch_function_state
        _group_tensors_by_device_and_dtype _is_any_autocast_enabled
        _is_fwd_grad_enabled _len_torch_dispatch_stack _len_torch_function_stack
        _meta_in_tls_dispatch_include _only_lift_cpu_tensors _set_conj _set_grad_enabled
        _set_fwd_grad_enabled _set_meta_in_tls_dispatch_include
        _set_mkldnn_enabled _set_neg _set_only_lift_cpu_tensors _set_sdp_priority_order _set_sdp_use_cudnn
        _set_sdp_use_flash _set_sdp_use_math _set_sdp_use_mem_efficient _set_throw_on_mutable_data_ptr
        _set_torch_function_state _set_warn_deprecated_on_mutable_data_ptr
        _swap_tensor_impl
    """,
    "torch._C.DispatchKey": "ADInplaceOrView AutocastCUDA Autograd CompositeImplicitAutograd Python",
    "torch._C._autograd": """
        _get_current_graph_task_keep_graph _get_sequence_nr _top_saved_tensors_default_hooks
        _unsafe_set_version_counter
    """,
    "torch._C._dynamo.eval_frame": "get_eval_frame_callback",
    "torch._C._functorch": "is_functorch_wrapped_tensor peek_interpreter_stack",
    "torch._decomp.decompositions": "lstm_impl upsample_compute_output_size",
    "torch._dispatch.python": "enable_python_dispatcher no_python_dispatcher",
    "torch._dynamo": "functional_export",
    "torch._dynamo._trace_wrapped_higher_order_op": "ModIndex TransformGetItemToIndex",
    "torch._dynamo.convert_frame": "CatchErrorsWrapper compile_lock",
    "torch._dynamo.eval_frame": "OptimizedModule _stance",
    "torch._dynamo.source": "ConstantSource",
    "torch._export.verifier": "SpecViolationError Verifier",
    "torch._functorch._aot_autograd.descriptors": """
        BufferAOTInput GradAOTOutput InputMutationAOTOutput ParamAOTInput PlainAOTInput PlainAOTOutput
        TangentAOTInput
    """,
    "torch._functorch._aot_autograd.schemas": "JointWithDescriptors",
    "torch._guards": "Source",
    "torch._higher_order_ops": "flex_attention",
    "torch._higher_order_ops.auto_functionalize": "auto_functionalized can_auto_functionalize",
    "torch._higher_order_ops.invoke_subgraph": "invoke_subgraph_placeholder",
    "torch._higher_order_ops.utils": "_hop_compile_and_call|setup_compilation_env _in_hop_compile",
    "torch._library.opaque_object": "is_opaque_reference_type|is_opaque_symbolic_type",
    "torch._ops": "HigherOrderOperator OpOverload OpOverloadPacket",
    "torch._prims_common": "suggest_memory_format",
    "torch._subclasses.fake_tensor": """
        DataDependentOutputException DynamicOutputShapeException FakeTensor FakeTensorMode
        unset_fake_temporarily
    """,
    "torch.autograd": "_engine_run_backward _profiler_enabled",
    "torch.autograd.graph": "_engine_run_backward",
    "torch.compiler": "_is_compiling_flag _is_exporting_flag",
    "torch.export.dynamic_shapes": "_DerivedDim _DimHint _StaticDim",
    "torch.export.dynamic_shapes._DimHintType": "AUTO DYNAMIC STATIC",
    "torch.fx._lazy_graph_module": "_LazyGraphModule",
    "torch.fx.experimental._config": "backed_size_oblivious",
    "torch.fx.experimental.proxy_tensor": """
        ProxyTorchDispatchMode PythonKeyTracer _CURRENT_MAKE_FX_TRACER _ProxyTensor
        disable_proxy_modes_tracing get_proxy_slot has_proxy_slot make_fx snapshot_fake track_tensor_tree
    """,
    "torch.fx.experimental.symbolic_shapes": """
        GuardOnDataDependentSymNode ShapeEnv StrictMinMaxConstraint free_unbacked_symbols
    """,
    "torch.fx.experimental.symbolic_shapes.DimDynamic": "DYNAMIC",
    "torch.fx.graph": "_custom_builtins",
    "torch.library": "_scoped_library",
    "torch.nn.modules.module": """
        _global_backward_hooks _global_backward_pre_hooks _global_forward_hooks _global_forward_pre_hooks
    """,
    "torch.optim.optimizer": """
        _foreach_supported_types _global_optimizer_post_hooks _global_optimizer_pre_hooks
    """,
    "torch.overrides": "_get_current_function_mode_stack _pop_mode _push_mode",
    "torch.utils": "_foreach_utils",
    "torch.utils._foreach_utils": "_foreach_supported_types",
    "torch.utils._python_dispatch": """
        TorchDispatchMode _disable_current_modes _get_current_dispatch_mode_stack _pop_mode _push_mode
        is_traceable_wrapper_subclass
    """,
    "torch.utils._pytree": """
        GetAttrKey KeyPath MappingKey SUPPORTED_NODES SequenceKey TreeSpec _get_node_type register_pytree_node
        tree_flatten tree_map tree_map_only tree_unflatten
    """,
    "torch.utils._sympy.functions": "ToFloat",
    "torch.utils._sympy.interp": "sympy_interp",
    "torch.utils._sympy.numbers": "int_oo",
    "torch.utils._sympy.printers": "PythonPrinter",
    "torch.utils._sympy.reference": "PythonReferenceAnalysis",
    "torch.utils._sympy.value_ranges": "ValueRanges",
    "torch.utils.checkpoint": "_CachingTorchDispatchMode _CheckpointFrame _is_compiling",
}
"""What is imported or reached, by the module or class that has it."""

ATTRIBUTES = {
    "torch.Generator": "_cdata",
    "torch.ScriptObject": "_type",
    "torch.Tensor": """
        _backward_hooks _base _cdata _has_symbolic_sizes_strides _is_view _make_subclass _nnz
        _post_accumulate_grad_hooks _version
    """,
    "torch.UntypedStorage": "_cdata",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch._dynamo.eval_frame.DisableContext": """
        _torchdynamo_disable _torchdynamo_disable_msg _torchdynamo_orig_callable
    """,
    "torch._dynamo.variables.functions.UserFunctionVariable": "_dynamo_marked_constant",
    "torch._export.wrappers.ExportTracepoint": "_export_tracepoint",
    "torch._ops.OpOverload": "_dispatch_cache _op _opname _overloadname _schema",
    "torch._subclasses.fake_tensor.FakeTensor": "_fake_device",
    "torch._subclasses.fake_tensor.FakeTensorMode": "_allow_unsafe_data_ptr_access dispatch",
    "torch.autograd.Function": "_backward_cls _register_hook",
    "torch.autograd.graph.Node": "_sequence_nr",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam": """
        _module_info _orig_param_uid _setattr_on_modules _unsharded_param
    """,
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup": """
        _all_reduce_hook _partial_reduce_output
    """,
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState": """
        _fsdp_param_groups _is_root _mp_policy _state_ctx
    """,
    "torch.distributed.fsdp.fully_shard": "_is_fsdp_managed_module",
    "torch.export.AdditionalInputs": "_examples",
    "torch.export._trace": "_export _export_root",
    "torch.fx.Graph": "_codegen _find_nodes_lookup_table _graph_namespace _len _root",
    "torch.fx.GraphModule": "_register_replace_node_hook _unregister_replace_node_hook",
    "torch.fx.Node": "_prepend",
    "torch.fx.experimental.proxy_tensor._MakefxTracer": "_trace_inner",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv": "_maybe_evaluate_static",
    "torch.fx.graph._Namespace": "_base_count _obj_to_name _used_names",
    "torch.nn.Module": """
        _backward_hooks _backward_pre_hooks _buffers _call_impl _compiled_call_impl _forward_hooks
        _forward_hooks_always_called _forward_hooks_with_kwargs _forward_pre_hooks
        _forward_pre_hooks_with_kwargs _get_backward_hooks _get_backward_pre_hooks _get_name
        _is_full_backward_hook _load_state_dict_pre_hooks _modules _non_persistent_buffers_set _parameters
        _slow_forward _state_dict_hooks _wrapped_call_impl
    """,
    "torch.nn.Parameter": "_is_param",
    "torch.nn.ParameterList": "_size",
    "torch.nn.modules.lazy.LazyModuleMixin": "_initialize_hook",
    "torch.optim.Optimizer": """
        _optimizer_step_post_hooks _optimizer_step_pre_hooks _warned_capturable_if_run_uncaptured
        _zero_grad_profile_name
    """,
    "torch.optim.SGD": "_need_device_dtype_check_for_fused",
    "torch.optim.lr_scheduler.LRScheduler": "_last_lr _opt_called _wrapped_by_lr_sched",
    "torch.optim.lr_scheduler.SequentialLR": "_schedulers",
    "torch.utils.hooks.BackwardHook": "_set_user_hook",
}
"""Attributes of objects, by their class, or by the function that sets or reads them."""

VARIABLES = {
    "torch.nn.Module._call_impl": "hook",
    "torch.optim.Optimizer.profile_hook_step": "args",
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator": "preserve_rng_state",
    "torch.utils.hooks.BackwardHook._set_user_hook": "hook",
    "torch.utils.hooks.BackwardHook.setup_output_hook": "user_hook user_pre_hook",
}
"""Variables of PyTorch's functions that are read from their frames or their source."""
