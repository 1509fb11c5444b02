"""The public surface: ``Pipeline`` and ``run_pipeline``."""

from rrfp.agreement_group import pipeline_group, resolve_agreement_group
from rrfp.arguments import StepRequest, check_state, check_timeout, is_timeout
from rrfp.moved_stages import StagesMoved
from rrfp.session_cache import cached_session, open_session, refused_together, shape_of

_SET_UP_TIMEOUT_S = 600.0


class Pipeline:
    """A pipeline that is set up once and stepped many times.

    Without ``torch.distributed``, or when ``stages`` is a list, all stages live in this process,
    one worker thread per rank. Else this process is one rank, its thread the worker, and every
    rank of the group must create the pipeline. Creating it blocks until all ranks are there.

    Args:
        stages: A list of all stages; or ``{stage_index: module}`` that this rank owns; or, under
            ``torch.distributed``, one module, this rank's only stage.
        edges: (source stage, target stage) pairs. Default: a chain.
        loss_stages: Stages whose output goes into a loss. Default: those without consumers.
        tied: Parameters of several stages to train as one: ``[(stage, name), ...]`` of equal
            copies (an embedding and the output layer, say), or a list of such lists. After a
            step each ``.grad`` has the sum over the copies.
        placement: ``"loop"`` (stage s on rank s mod ranks), ``"v"`` (there and back) or the rank
            of each stage.
        num_ranks: Ranks in one process. Default: one per stage.
        group, agreement_group, transport: As for ``run_pipeline``.
        set_up_timeout_s: How long to wait for the other ranks; where agreement groups are formed,
            up to 10 s more, so that whoever knows which rank is missing can say so, and 5 s once
            all are there.

    Raises:
        ValueError: Stages that are missing, twice, or that this version does not run.
        RankTimeoutError: A rank did not come; the message names it.

    Example:
        >>> import rrfp, torch
        >>> stages = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
        >>> batch = [torch.randn(2, 4) for _ in range(3)]
        >>> with rrfp.Pipeline(stages) as pipeline:
        ...     result = pipeline.step(batch, batch, lambda out, _: out.square().mean())
        >>> len(result.losses)
        3
    """

    def __init__(
        self,
        stages,
        *,
        edges=None,
        loss_stages=None,
        tied=None,
        placement="loop",
        num_ranks=None,
        group=None,
        agreement_group=None,
        transport="auto",
        set_up_timeout_s=_SET_UP_TIMEOUT_S,
    ):
        joined = pipeline_group(group)
        timeout_s = set_up_timeout_s if is_timeout(set_up_timeout_s) else _SET_UP_TIMEOUT_S
        with refused_together(stages, joined, timeout_s) as known:
            known.agreement_group = resolve_agreement_group(agreement_group, group)
            check_timeout("set_up_timeout_s", set_up_timeout_s)
            shape = shape_of(placement, edges, loss_stages, tied)
        self._modules, self._session = open_session(
            stages, shape, num_ranks, joined, known.agreement_group, transport, timeout_s
        )

    def step(
        self,
        microbatches=None,
        targets=None,
        loss_fn=None,
        *,
        num_microbatches=None,
        stage_kwargs=None,
        hint="auto",
        slack="auto",
        max_in_flight=None,
        activation_bytes=None,
        split_backward=None,
        add_in_products=False,
        deterministic=False,
        seed=None,
        microbatch_order="given",
        costs=None,
        loss_reduction="mean",
        grad_scale=None,
        return_outputs=False,
        broadcast_loss=False,
        forward_only=False,
        lookahead="jit",
        stall_timeout_s=600.0,
    ):
        """Run one training step; the arguments are those of ``run_pipeline``.

        Blocks until the last task of this process has run and every rank has finished.

        Raises:
            ValueError: Wrong arguments, on every rank; nothing ran, the pipeline is usable.
            RrfpError: The step ended early; the pipeline is closed.
        """
        options = dict(locals())
        del options["self"]
        request = _request(self._session, self._modules, options)
        return self._session.run(self._modules, request)

    def eval_step(self, microbatches=None, targets=None, loss_fn=None, **options):
        """Run forwards only, without gradients; the same as ``step(..., forward_only=True)``.

        It does not change train or eval mode.
        """
        return self.step(microbatches, targets, loss_fn, forward_only=True, **options)

    def state_dict(self):
        """What a resumed run needs to draw the same random numbers: ``{"step": steps run}``."""
        return {"step": self._session.counter}

    def load_state_dict(self, state):
        """Go on counting steps where ``state_dict()`` was taken; the same on every rank.

        Raises:
            TypeError, ValueError: Not such a dict.
        """
        step = check_state(state)
        self._session.counter = step

    def dump(self, as_json=False):
        """A text (or JSON): per rank of this process what it runs or waits for, and from whom.

        With its last 32 decisions, and what other processes said last. Any thread; never waits.
        """
        return self._session.dump(as_json)

    def close(self):
        """End worker threads and connections; more than once is fine."""
        self._session.close()

    def __reduce__(self):
        raise TypeError(
            "a Pipeline can be neither copied nor pickled: it holds connections and threads. Copy "
            "or save its stages and its state_dict(), and build a new Pipeline of them."
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def run_pipeline(
    stages,
    microbatches=None,
    targets=None,
    loss_fn=None,
    num_microbatches=None,
    stage_kwargs=None,
    hint="auto",
    slack="auto",
    max_in_flight=None,
    activation_bytes=None,
    split_backward=None,
    add_in_products=False,
    deterministic=False,
    seed=None,
    microbatch_order="given",
    costs=None,
    loss_reduction="mean",
    grad_scale=None,
    return_outputs=False,
    broadcast_loss=False,
    forward_only=False,
    edges=None,
    loss_stages=None,
    tied=None,
    placement="loop",
    num_ranks=None,
    group=None,
    agreement_group=None,
    transport="auto",
    lookahead="jit",
    stall_timeout_s=600.0,
):
    """Run one training step of a pipeline; set-up is cached, call it every iteration.

    Tasks run as they become ready. ``hint`` only ranks tasks that are ready at the same moment,
    so a late message delays its own task and no other. Gradients are added to ``.grad`` as a
    plain loop over the microbatches would add them.

    Blocks until the last task of this process has run and every rank has finished. Without
    ``torch.distributed``, or when ``stages`` is a list, all stages run in this process, one
    worker thread per rank; else every rank of the group must call this.

    Args:
        stages: A list of all stages; or ``{stage_index: module}`` that this rank owns; or, under
            ``torch.distributed``, one module, this rank's only stage. A stage is called with its
            boundary value: a tuple becomes positional arguments, anything else is one argument.
        microbatches: One input per microbatch on the ranks of source stages (of a chain: stage
            0), None elsewhere; ``{stage: inputs}`` where source stages get different ones. An
            iterator is drawn in full before anything runs, and needs ``num_microbatches``.
        targets: One per microbatch on the ranks of loss stages (of a chain: the last), or
            ``{stage: targets}``. On other ranks only their number is looked at.
        loss_fn: ``loss_fn(output, target)``, which returns a scalar tensor, or (scalar, metrics);
            or one for each loss stage, ``{stage: loss_fn}``.
        num_microbatches: Checked against what was given; other ranks learn it by themselves.
        stage_kwargs: ``{stage_index: sequence of dict}``, keyword arguments per microbatch.
        hint: ``"auto"``, ``"1f1b"``, ``"gpipe"``, ``"bf"``, ``"bfw"``, ``"fb"``,
            ``"b-priority"``, ``"f-priority"``, ``"zb-h1"``, ``"interleaved"``,
            ``"zbv"``, or an order of your own: a list of the task texts of all ranks
            (``["0F0", "0B0", "1F0", ...]``; each rank takes its own, as they stand),
            ``{rank: list of task texts}``, or a schedule of torch's (a ``.csv`` path, or its
            text). Or a callable ``rank(task, state)``: called once per task when a step begins,
            with a ``Task`` and a ``HintState``; the task with the lowest number is preferred.
            Between processes rank 0's is called, and every rank must pass one.
        slack: How many hint positions a task may overtake: an int, or None for any number; 0 runs
            the hint as a fixed order. ``"auto"``: any number; but with hint ``"auto"`` and a tight
            limit, as the default is, twice the number of ranks where ranks have several stages,
            and from the ninth step on a fixed order, or slack 2, where that would be faster.
        max_in_flight: Forwards whose backward has not begun on a rank, one for each stage and
            microbatch: an int, a list per rank, ``"1f1b"`` (ranks behind it, and itself) or
            ``"1f1b+2"`` (two more). Or bytes of activations, such as ``"24GiB"``, also in the list.
            Default: the number of ranks; with several stages per rank, the peak of their own order.
        activation_bytes: For limits in bytes, what a forward holds until its backward, at most:
            one size for all stages, or ``{stage: size, or one per microbatch}``; of each stage on
            one rank at least. Sizes are ints or texts such as ``"2GiB"``. Of other stages it is
            measured; the first step counts microbatches there.
        split_backward: Run each backward as two tasks: I, the gradients that the stage before
            waits for, and W, those of the parameters. None: where the hint (``"bfw"``,
            ``"zb-h1"``, ``"zbv"``) or ``deterministic`` needs it. Stages whose backward cannot be
            split are named in the report.
        add_in_products: W adds a matrix product to a parameter's ``.grad`` while it computes it
            (GEMM with beta = 1; Megatron-core's gradient accumulation fusion), which saves two
            passes over the gradients and rounds once less. For parameters of plain layers in the
            gradient's dtype, without hooks; others are added as ever, and so are all where
            backwards are not split or several ranks are threads of one process.
        deterministic: Add parameter gradients in the order of microbatches (a hint's own, where
            it is a list or a callable), so that they have the same bits in every run, those of a
            plain loop in that order.
        seed: Of the random numbers, which depend on it, the step, the stage and the microbatch
            alone (see ``task_rng``). None: ``torch.initial_seed()`` on rank 0.
        microbatch_order: ``"given"``, ``"mid"`` (by ``costs``: short first and last, long in the
            middle), a list or iterator, or a callable of the costs. Results stay in the caller's
            order.
        costs: One number per microbatch, such as its tokens; on any rank.
        loss_reduction: ``"mean"``, ``"sum"``, or one weight per microbatch, used as given.
        grad_scale: A number that gradients are multiplied with (AMP).
        return_outputs: Return the last stage's outputs, detached.
        broadcast_loss: Return the losses on every rank.
        forward_only: Run forwards alone, without gradients; train or eval mode stays.
        edges: (source stage, target stage) pairs. Default: a chain.
        loss_stages: Stages whose output goes into a loss. Default: those without consumers.
        tied: Parameters of several stages to train as one: ``[(stage, name), ...]`` of equal
            copies (an embedding and the output layer, say), or a list of such lists. After a
            step each ``.grad`` has the sum over the copies.
        placement: ``"loop"`` (stage s on rank s mod ranks), ``"v"`` (there and back) or the rank
            of each stage.
        num_ranks: Ranks in one process. Default: one per stage.
        group: The process group of the pipeline, or a DeviceMesh with a dimension "pp". Default:
            the world.
        agreement_group: Ranks of other pipelines that hold the same stages and meet this one in
            collectives inside a task (tensor parallelism), so must run one order of tasks: a
            process group on one host, or ``"auto"``: tp, cp and ep of the mesh given as group.
            ``"none"``: what looks like it in a stage (a DTensor) runs none inside a task.
        transport: ``"auto"``; ``"local"`` (one process); ``"socket"`` (Unix sockets on a host, TCP
            between hosts) or ``"tcp"``; on GPUs ``"ipc"`` or ``"nccl"`` (auto: IPC if it can).
        lookahead: When a GPU's next task is chosen (on CPU: when it runs). ``"jit"``: just in time,
            when the running one may end in as long as a launch takes, by what tasks and
            launches took before (a fixed order chooses nothing: as ``"eager"``); ``"eager"``: as
            soon as the one before it runs; 1: when all others have ended.
        stall_timeout_s: Seconds without progress on any rank before ``StallError``; also how
            long ranks wait for one another at the start. A rank inside a task is busy, however
            long the task takes; but not a GPU: what it has not ended by then counts as hung.

    Returns:
        ``StepResult``: losses, metrics and outputs on the rank of the last stage, and a report.

    Raises:
        ValueError, TypeError: Wrong arguments or ranks that disagree; raised on every rank
            before any task runs. The pipeline is usable.
        StageError: A stage raised. The next call builds the pipeline anew.
        StallError: Nothing could run; says what each rank waits for. As above.
        RankTimeoutError: A rank did not come to the step or the set-up within ``stall_timeout_s``.
        ClosedError: Another rank closed the pipeline, or its script ended or raised between steps.
        InterruptedStepError: Another rank got Ctrl-C, and raises KeyboardInterrupt.
        PeerLostError: A process died or fell silent. The process group must be rebuilt.
        DeviceError, ProtocolError: A call of CUDA or NCCL failed; a message was malformed.

    Example:
        >>> import rrfp, torch
        >>> stages = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
        >>> inputs, targets = torch.randn(6, 4), torch.randn(6, 1)
        >>> result = rrfp.run_pipeline(
        ...     stages, inputs.chunk(3), targets.chunk(3), torch.nn.functional.mse_loss
        ... )
        >>> len(result.losses)
        3
    """
    arguments = dict(locals())
    # A wrong time-out is refused below, on every rank alike.
    set_up_timeout_s = stall_timeout_s if is_timeout(stall_timeout_s) else _SET_UP_TIMEOUT_S
    joined = pipeline_group(group)
    with refused_together(stages, joined, set_up_timeout_s) as known:
        known.agreement_group = resolve_agreement_group(agreement_group, group)
        shape = shape_of(placement, edges, loss_stages, tied)
    opening = (stages, shape, num_ranks, joined, known.agreement_group, transport,
               set_up_timeout_s)
    session, modules = cached_session(*opening)
    for name in ("stages", "placement", "edges", "loss_stages", "tied", "num_ranks",
                 "group", "agreement_group", "transport"):
        del arguments[name]
    request = _request(session, modules, arguments)
    try:
        return session.run(modules, request)
    except StagesMoved as moved:  # on every rank
        if session.is_grouped:  # the other pipelines of the group know nothing of it
            raise
        session.close(str(moved))
        counter = session.counter
        session, modules = cached_session(*opening)
        session.counter = counter
        return session.run(modules, request)


def _request(session, modules, options):
    """The arguments of Pipeline.step or run_pipeline, checked and drawn."""
    try:
        return StepRequest(
            session.layout, set(modules), launch_note=session.launch_note, **options
        )
    except BaseException as error:  # also what the caller's own iterators raise, and Ctrl-C there
        session.refuse(error, options["stall_timeout_s"])
        raise
