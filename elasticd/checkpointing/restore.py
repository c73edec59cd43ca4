"""All ranks load a state together: rank 0 chooses, all load the same one, all succeed or all raise.

Every agreement is a word of each rank to rank 0 and rank 0's decision, which every rank waits for. N counts the choices
that have been tried.

    key              word of each rank                         rank 0's decision               made where
    held             its node's memory (a node's first rank)   restore/N: the choice           always
                     and what its process holds
    settled          its node has written its shards           restore/N/settled: the choice   shards may be missing
    verified/N       its part of the files is whole, or can    use it, or reject it            the state is sharded
                     be read from their nodes
    read, send       it can read the state                     who sends it, to whom           there are several ranks
    sent, opened     it has received the state                 who still lacks it              a node's memory lacks it
    draws/N          its random state is known; those that     use it, or reject it; which     not on the disk,
                     it has sent to ranks that have moved      have been sent                  several nodes
    placed/N         it can receive each tensor                use it, reject it, or raise     ranks hold the state
    loaded,          it has loaded the state                   all have, or all raise          always
    restored

The order is what keeps ranks alike. Nothing is loaded before all ranks can read all of the same state: an object that
has loaded one state and then another may keep parts of both. Every rejection is an agreement, so that no rank tries
another choice than the rest. Random states are set last, since a load_state_dict() may draw. Only when all ranks have
loaded the state does it become this round's own: relinked in the directory, or adopted in memory. From then on
whatever an older round still writes is not loaded. A round that dies before that leaves the choice as it was.

A state that is rejected because a rank's draws are unknown stays rejected, as does one that was saved at a fault and
that a rank cannot load: the next rounds, which have not the records that show it, learn of it by
`step_files.refused_states`. Otherwise a round that begins anew and dies before its first save would be followed by one
that resumes from that state with other random numbers, and each round would try again what cannot be loaded.

`choice` has the rule of the choice; `state_opener` the way of the state to each rank, `process_state` that of one which
ranks hold in their processes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from elasticd.channel import Message
from elasticd.checkpointing.at_fault import committed_state, held_commit, step_files
from elasticd.checkpointing.at_fault.donor import Donor
from elasticd.checkpointing.choice import Choice, Chooser, OpenState, StateSource
from elasticd.checkpointing.context import SaveContext
from elasticd.checkpointing.directory_writes import PATIENCE_SHARE
from elasticd.checkpointing.memory import held_states
from elasticd.checkpointing.memory.buffers import Snapshot, donor_of
from elasticd.checkpointing.memory.held_states import ShardsInMemory
from elasticd.checkpointing.memory.writer_client import LOST_PART_WAIT_S, SnapshotRefused
from elasticd.checkpointing.process_state import ProcessState
from elasticd.checkpointing.saver import Saver
from elasticd.checkpointing.state import in_place, shard_plan, sharded, training_state
from elasticd.checkpointing.state.training_state import Notes, RandomState, StateDict
from elasticd.checkpointing.state_opener import StateOpener
from elasticd.checkpointing.storage import checkpoint_files
from elasticd.checkpointing.storage.lineage import lineage, open_verified
from elasticd.checkpointing.storage.manifest import Manifest
from elasticd.checkpointing.storage.object_store import store_of
from elasticd.checkpointing.storage.object_url import path_or_url
from elasticd.errors import CheckpointCorrupt, CheckpointError, UsageError

logger = logging.getLogger("elasticd")

_KEEP_ALL = 1 << 30


@dataclass(frozen=True, slots=True)
class Resumed:
    """The checkpoint that `restore()` loaded."""

    round: int
    step: int
    world_size: int
    notes: tuple[str, ...] = ()
    """Sentences about what could not be used of it, and on which rank; the same on every rank."""


def restore(
    attached: Mapping[str, Any],
    optional: Collection[str],
    step: int | None,
    saver: Saver,
    holder: Donor | None = None,
) -> Resumed | None:
    """Load the newest valid checkpoint, or that of `step`, into `attached` on every rank, or raise on every rank; None
    without a checkpoint. The checkpoint may hold nothing for the names in `optional`. `holder` may hold a state in this
    process.
    """
    run = Restore(saver, attached, optional, step, holder)
    with contextlib.closing(run.opened), training_state.no_garbage_collection():
        return run.resume()


def may_have_state(context: SaveContext) -> bool:
    """A state of this run is in this node's memory, or any in the directory."""
    with contextlib.suppress(OSError, SnapshotRefused):
        if context.writer is not None and context.writer.find_all():
            return True
    with contextlib.suppress(OSError):
        return context.directory is not None and bool(lineage(context.directory)[0])
    return True  # a disk or store that cannot be read now


def check_unrestored(context: SaveContext, attached: Collection[str]) -> None:
    """Warn, at the first step of a script that has not called `restore()`, that a checkpoint is left unused.

    Raises UsageError, on every rank, where a restart has left a checkpoint of its own run unused; a checkpoint of
    another run may be unused on purpose.
    """
    own, directory = context.environment, context.chosen_directory

    def find() -> Message:
        manifests: list[Manifest] = []
        with contextlib.suppress(OSError):  # a disk or store that cannot be read now; saves will say so
            manifests += [entry.manifest for entry in lineage(directory)[0][:1]]
        with contextlib.suppress(OSError, SnapshotRefused):
            manifests += (
                [snapshot.draft for snapshot in context.writer.find_all()] if context.writer is not None else []
            )
        newest = max(manifests, key=lambda manifest: (manifest.round, manifest.step), default=None)
        if newest is None:
            return {"step": 0, "attached": [*attached]}
        is_ours = (newest.job, newest.run) == (own.job, own.run)
        if is_ours and (own.restarts > 0 or 0 < newest.round < own.round):
            raise UsageError(
                f"{where} of step {newest.step} from before the restart, and session.restore() was not called: "
                "training would begin anew. Call it after session.attach()"
            )
        return {"step": newest.step, "attached": [*attached]}

    where = f"{path_or_url(directory)} has a checkpoint"
    found = context.channel.on_rank0("unrestored", "whether there is a checkpoint", find)
    context.attached_on_rank0 = found.get("attached")
    if step := found["step"]:
        what = f"{where} of step {step}, and session.restore() was not called: training begins anew, at step 0"
        context.warn("message", what)


class Restore:
    """One restore of one rank."""

    def __init__(
        self,
        saver: Saver,
        attached: Mapping[str, Any],
        optional: Collection[str],
        step: int | None,
        holder: Donor | None,
    ) -> None:
        """`step`: that to go back to, once in a directory; None: the newest one."""
        context = saver.context
        self._saver, self._context, self._directory = saver, context, context.chosen_directory
        self._attached, self._optional, self._goes_back = attached, optional, step is not None
        self.opened = OpenState()
        self._held: list[Snapshot] = []
        """The states in the node's memory; none but on the first rank of each node."""
        self._chooser = Chooser(context, self._directory, step, self.opened)
        """Rank 0's part; unused on the others."""
        self._opener = StateOpener(context, self._directory, self.opened, self._held)
        self._holder = holder
        self._process = ProcessState(context, self.opened, None if holder is None else holder.held)
        self._moved: RandomState | None = None
        """This rank's random state, from the node where it was."""

    def resume(self) -> Resumed | None:
        choice = self._choose()
        if choice is None:
            if self._context.group.rank == 0 and (repeated := self._lost_steps_notes(0)):
                self._chooser.report(f"there is no checkpoint yet: {repeated[0]}", None)
            return None
        notes: list[str] = []
        error: Exception | None = None
        donor = None
        try:
            notes, donor = self._load_all(choice)
        except Exception as raised:  # noqa: BLE001 - all ranks must learn of any error of a load_state_dict
            error = raised
        resumed = self._agree_on_success(choice, error, notes)
        self._context.parent = choice.manifest.trained_as
        if self._context.group.rank == 0:
            self._report_resumed(choice, resumed, donor)
        self._take_ownership(choice)
        return resumed

    # --- the choice ---------------------------------------------------------------------------------------------------

    def _choose(self) -> Choice | None:
        """The state that every rank has open, or can read; None: there is none."""
        may_wait = self._saver.sharded_saver(self._attached) is not None
        word = {**self._find_states_in_memory(), **self._process.to_message()}
        held = self._context.channel.gather_on_rank0("held", json.dumps(word).encode(), "what its node has in memory")
        in_memory, self._chooser.servers = held_states.merge_messages(held)
        self._chooser.states = sorted(
            held_commit.decode_held_states(held) + in_memory, key=held_states.newest_first_key
        )
        attempt = 0
        choice = self._choose_once(attempt, may_wait)
        while choice is not None and not self._agree_on_choice(choice, attempt):
            self.opened.close()
            attempt += 1
            choice = self._choose_once(attempt, may_wait=bool(choice.file_holders))
        return choice

    def _find_states_in_memory(self) -> Message:
        """The states in this node's memory, from its first rank."""
        writer, who = self._context.writer, self._context.environment
        if writer is None or writer.share != 0:
            return {}
        step_files.refuse_states(step_files.refused_states(who.round - 1))
        try:
            snapshots = writer.find_all()
        except (OSError, SnapshotRefused):
            return {}
        self._held += [
            snapshot for snapshot in snapshots if (snapshot.draft.job, snapshot.draft.run) == (who.job, who.run)
        ]
        return held_states.node_message(self._held, writer, who)

    def _choose_once(self, attempt: int, may_wait: bool) -> Choice | None:
        """Rank 0's choice, on every rank. `may_wait`: a sharded state that is being written may be the newest one."""

        def decide(may_wait: bool) -> Message:
            if may_wait and self._chooser.may_be_incomplete:
                return {"wait": True}
            choice = self._chooser.choose()
            return {"attached": [*self._attached], **(choice.to_message() if choice is not None else {"step": None})}

        key, what, channel = f"restore/{attempt}", "which state it restores", self._context.channel
        message = channel.on_rank0(key, what, lambda: decide(may_wait))
        if "wait" in message:
            self._wait_for_shards()
            message = channel.on_rank0(f"{key}/settled", what, lambda: decide(may_wait=False))
        self._context.attached_on_rank0 = message.get("attached")  # a rank of the version before does not say it
        return Choice.from_message(message) if message["step"] is not None else None

    def _wait_for_shards(self) -> None:
        """Wait for the sharded states that earlier rounds have copied to be written: they are the newest ones."""
        writer, channel, rank = self._context.writer, self._context.channel, self._context.group.rank
        patience_s = PATIENCE_SHARE / 2 * channel.timeout_s  # rank 0's node waits after the others, which wait for it

        def settle() -> None:
            if writer is not None and writer.share == 0:
                with contextlib.suppress(OSError, SnapshotRefused):
                    writer.are_shards_pending(True, patience_s, LOST_PART_WAIT_S)

        if rank != 0:
            settle()
        channel.gather_on_rank0("settled", b"", "whether its node has written what it has in memory")
        if rank == 0:
            settle()

    def _agree_on_choice(self, choice: Choice, attempt: int) -> bool:
        """All ranks have it open or can read it, and know their random states. If not, rank 0 has rejected it."""
        if choice.file_holders:
            return self._agree_on_shards(choice, attempt)
        if choice.manifest.files and not self._agree_on_files(choice, attempt):
            return False
        if choice.in_processes:
            self._process.open_small_part(choice)
            if not self._agree_on_places(choice, attempt):
                return False
        else:
            self._opener.open_everywhere(choice, attempt)
        return choice.source is StateSource.DISK or self._agree_on_draws(choice, attempt)

    def _agree_on_places(self, choice: Choice, attempt: int) -> bool:
        """Every rank has a place for what processes hold; else another state in processes is next.

        Raises CheckpointError, on every rank, where that cannot be: the ranks that hold the chosen state then save it.
        """
        has_held = self._holder is not None and self._holder.held is not None
        word = {"why": self._process.reason_against(self._attached), "holds": has_held}
        judge = functools.partial(self._chooser.judge_places, choice)
        verdict = self._context.agree(f"placed/{attempt}", "whether it can receive the state", word, judge)
        if verdict["why"] and not verdict["rejected"]:
            self._drop_unchosen(choice)
            raise CheckpointError(verdict["why"])
        return not verdict["why"]

    def _drop_unchosen(self, choice: Choice) -> None:
        """This process gives up a state that has not been chosen."""
        if self._holder is not None and not (choice.in_processes and self._context.group.rank in choice.holder_ranks):
            self._holder.drop_held()

    def _agree_on_shards(self, choice: Choice, attempt: int) -> bool:
        """Each node can read the parts of a sharded state that other nodes have in memory."""
        context = self._context
        shards = ShardsInMemory(choice.key, choice.file_holders, choice.servers, context.writer, context.environment)
        self.opened.shards = shards
        own = shards.check_readable() if context.environment.local_rank == 0 else ""
        what = f"whether it can read {choice.name} in memory"
        return self._agree_on_use(
            f"verified/{attempt}", what, own, functools.partial(self._chooser.reject_held, choice)
        )

    def _agree_on_draws(self, choice: Choice, attempt: int) -> bool:
        """No rank on another node than the donor has died in the step after it had drawn what nobody knows: with other
        numbers the ranks of a script that draws alike would diverge.

        The node where a rank was has its random state. Where the rank has another node now, the first rank of that node
        sends it.
        """
        context, key = self._context, f"random/{attempt}"
        rank, world_size, local_rank = context.group.rank, context.group.world_size, context.environment.local_rank
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if local_size == world_size:
            return True
        here = range(rank - local_rank, rank - local_rank + local_size)
        why, states = "", {}
        with contextlib.suppress(Exception):  # loading says what is wrong
            saved = self.opened.load()[training_state.RESERVED_NAME]
            lacking = [other for other, state in enumerate(saved["rng"][:world_size]) if state is None]
            for other in lacking:
                if other == rank or (local_rank == 0 and other not in here):
                    try:
                        states[other] = self._recorded_random_state(choice, saved, other)
                    except CheckpointError as error:
                        why = why or str(error)
        sent = [other for other, state in states.items() if state is not None and other != rank]
        for other in sent:
            context.channel.put(f"{key}/{other}", training_state.to_bytes(states[other]))
        word: Message = {"why": why, "sent": sent}

        def decide(words: list[Message]) -> Message:
            why = next(filter(None, (answer["why"] for answer in words)), "")
            if why:
                self._chooser.reject_held(choice, why, below=choice.step)
            return {"why": why, "sent": [other for answer in words for other in answer["sent"]]}

        agreed = context.agree(f"draws/{attempt}", "whether its random state is known", word, decide)
        if rank in agreed["sent"]:
            self._moved = training_state.from_bytes(
                context.channel.read_from_rank0(f"{key}/{rank}", "its random state")
            )
            context.channel.delete(f"{key}/{rank}")
        if agreed["why"] and local_rank == 0:
            step_files.refuse_states([(choice.manifest.round, choice.save_number)])
        return not agreed["why"]

    def _agree_on_use(self, key: str, what: str, own: str, reject: Callable[[str], None]) -> bool:
        """No rank has a reason against the choice; rank 0 rejects it for the first reason that there is."""

        def decide(whys: list[str]) -> dict[str, str]:
            why = next(filter(None, whys), "")
            if why:
                reject(why)
            return {"why": why}

        return not self._context.agree(key, what, own, decide)["why"]

    def _agree_on_files(self, choice: Choice, attempt: int) -> bool:
        """All files of a sharded checkpoint are whole; each rank reads some of them.

        Raises CheckpointError on every rank where a rank does not see the checkpoint, or cannot read it now.
        """
        entry = choice.place_entry(self._directory)
        store = store_of(self._directory)
        word = {"shared": entry.path.is_dir(), "why": ""}
        share, shares = self._context.group.rank, self._context.group.world_size
        if store is not None:  # each node reads all files, which copies them to it
            share, shares = self._context.environment.local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        for name in sorted(choice.manifest.files)[share::shares]:
            try:
                os.close(open_verified(entry, name))
            except (CheckpointCorrupt, FileNotFoundError) as error:
                word["why"] = str(error)
            except OSError as error:  # a store that cannot be read now has lost nothing
                word["why" if store is None else "error"] = str(error)

        def decide(words: list[Message]) -> dict[str, str]:
            if blind := [str(rank) for rank, answer in enumerate(words) if not answer["shared"]]:
                raise CheckpointError(
                    f"rank {', '.join(blind)} cannot see {entry.path}: a sharded checkpoint needs a directory that all "
                    "nodes share"
                )
            if failed := [(rank, answer["error"]) for rank, answer in enumerate(words) if "error" in answer]:
                raise CheckpointError(f"rank {failed[0][0]} cannot read {entry.path}: {failed[0][1]}")
            why = next((answer["why"] for answer in words if answer["why"]), "")
            if why:
                self._chooser.reject_checkpoint(choice, why)
            return {"why": why}

        what = f"whether its part of {choice.name} is whole"
        return not self._context.agree(f"verified/{attempt}", what, word, decide)["why"]

    # --- loading ------------------------------------------------------------------------------------------------------

    def _load_all(self, choice: Choice) -> tuple[Notes, int | None]:
        """Load all that is attached; returns sentences about what was not used, and the rank that saved the state at a
        fault.
        """
        content = self.opened.load()
        saved = content[training_state.RESERVED_NAME]
        self._drop_unchosen(choice)
        notes = self._load_attached(choice, content)
        saved_by = None if choice.in_processes else donor_of(choice.key[1])
        donor = None if saved_by is None else saved.get(committed_state.DONOR_KEY, saved_by)
        rank, world_size = self._context.group.rank, self._context.group.world_size
        states = saved.get("per_rank", {})
        notes += training_state.load_per_rank(self._context.per_rank, states, rank, world_size, self._optional)
        return notes + self._restore_random_state(choice, saved), donor

    def _load_attached(self, choice: Choice, content: StateDict) -> Notes:
        """Load the attached objects; returns sentences about what was not used."""
        names = content[training_state.RESERVED_NAME].get(sharded.NAMES_KEY, [])
        attached, opened = self._attached, self.opened
        large = {name: obj for name, obj in attached.items() if name in names}
        divided = {
            name: attached[name] for name in sharded.names_saved_in_shards(attached) - {*names} if name in content
        }
        small = {name: obj for name, obj in attached.items() if name not in names and name not in divided}
        if divided:
            sharded.load_attached(divided, sharded.divide_whole_state(divided, content))
        if large:
            open_file = (
                opened.shards.open
                if opened.shards
                else shard_plan.open_on_disk(choice.place_entry(self._directory).path)
            )
            sharded.load_attached(
                large, shard_plan.load_shards(open_file, lambda metadata: sharded.make_load_targets(large, metadata))
            )
        unused = [name for name in names if name not in large]
        read = functools.partial(in_place.read, opened.fd, content, small, opened.checksum)
        if choice.in_processes:
            received = self._process.receive(choice)  # every rank, whatever loading says of its objects
            read = functools.partial(frozenset, received)
        notes = training_state.load_attached(small, content, self._optional, read)
        return notes + [f"nothing is attached as {name}: that part of the checkpoint was not used" for name in unused]

    def _restore_random_state(self, choice: Choice, saved: Mapping[str, Any]) -> Notes:
        """Restore this rank's random state, last: no load_state_dict moves the streams again."""
        every_rank, group = saved["rng"], self._context.group
        rank, ranks, world_size = group.rank, len(every_rank), group.world_size
        counts = f"saved by {ranks} rank{'s' if ranks > 1 else ''}, now {world_size}"
        notes: list[str] = []
        if rank == 0 and ranks > world_size:
            unused = ", ".join(map(str, range(world_size, ranks)))
            notes.append(f"{counts}: the random state of rank {unused} was not used")
        if rank >= ranks:
            return [f"{counts}: there is no random state for rank {rank}, which keeps its own"]
        if (own := every_rank[rank]) is not None:
            return notes + training_state.set_random_state(own, group.device)
        if (own := self._recorded_random_state(choice, saved, rank) or self._moved) is None:
            lost = f"the random state of rank {rank} at step {choice.step} is lost: it draws other numbers from here on"
            return [*notes, lost]
        notes += training_state.set_random_state(own, group.device)
        with contextlib.suppress(OSError):
            step_files.keep_restored_random_state(rank, choice.step, group.device)
        return notes

    def _recorded_random_state(self, choice: Choice, saved: Mapping[str, Any], rank: int) -> RandomState | None:
        """A rank's random state, if its process of that round was on this node; None if nothing is known. A donor on
        another node has not had it. Raises CheckpointError if the process had died in the step, and may have drawn
        more.
        """
        if "ELASTICD_HEARTBEAT" not in os.environ:
            return None
        step, round = choice.step, choice.manifest.round
        buffers = [holder[key] for _, (holder, key) in step_files.buffer_places(self._attached)]
        own = list(filter(step_files.is_on_host, buffers))
        record = committed_state.RankRecord(rank, step, own, round)
        if record.committed is None and committed_state.RNG_DRAWS_KEY not in saved:  # by a donor of an older version
            if record.expected is not None and saved.get(committed_state.RNG_EXPECTED_KEY, False):
                return record.expected.random_state
            return step_files.kept_restored_random_state(rank, step, round)
        known = record.random_state(committed_state.RankDraws.from_saved(saved))
        return known or step_files.kept_restored_random_state(rank, step, round)

    def _agree_on_success(self, choice: Choice, error: Exception | None, notes: list[str]) -> Resumed:
        """All ranks have loaded the state, or all raise: each its own error, or one that names the others'."""
        word = {"error": f"{type(error).__name__}: {error}" if error else "", "notes": notes}
        words: list[Message] = self._context.agree(
            "loaded", "its loading", word, lambda words: {"answers": words}, "restored"
        )["answers"]
        if failed := [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(words) if answer["error"]]:
            self._refuse_if_saved_at_fault(choice, failed[0])
            # Rank 0 may serve the store itself, and is about to leave.
            self._context.channel.leave("restored/received")
            raise error or CheckpointError(f"{choice.name} could not be restored by every rank: {'; '.join(failed)}")
        merged = tuple(dict.fromkeys(note for answer in words for note in answer["notes"]))
        return Resumed(choice.manifest.round, choice.step, choice.manifest.world_size, merged)

    def _refuse_if_saved_at_fault(self, choice: Choice, why: str) -> None:
        """The next round takes an older state: this one may be of a step at which no round can begin."""
        if not choice.in_memory or donor_of(choice.key[1]) is None:
            return
        if self._context.environment.local_rank == 0:
            step_files.refuse_states([(choice.manifest.round, choice.save_number)])
        if self._context.group.rank == 0:
            what = f"the state of step {choice.step}, which was saved at the fault, is not used again: {why}"
            self._chooser.report(what, choice.step)

    # --- the state becomes this round's own ---------------------------------------------------------------------------

    def _report_resumed(self, choice: Choice, resumed: Resumed, donor: int | None) -> None:
        where = f"resumed from step {resumed.step} of round {resumed.round}"
        origin = {"from_round": resumed.round, "from_step": resumed.step, "saved_at": choice.manifest.wall}
        if donor is not None:
            where += f", saved by rank {donor} after the fault"
            origin |= {"donor": donor, "steps_saved": max(resumed.step - choice.step_on_disk, 0)}
        if choice.in_memory:
            where += ", in memory"
        if choice.in_processes:
            where += f", in the processes of rank {', '.join(map(str, choice.holder_ranks))}"
            origin["in_processes"] = True
        reason = "; ".join([where, *self._lost_steps_notes(resumed.step), *resumed.notes])
        path = str(self._directory / choice.name)
        self._context.events.write("resumed", reason, resumed.step, path=path, **origin)
        for note in resumed.notes:
            logger.warning("%s: %s", where, note)

    def _take_ownership(self, choice: Choice) -> None:
        """Make the state this round's first, so that what older rounds write later is not loaded."""
        try:
            if self._chooser.entry is not None and not self._chooser.is_on_trial:
                checkpoint_files.relink(self._directory, self._chooser.entry, self._context.round)
            elif choice.in_memory:
                self._adopt_in_memory(choice)
        except (OSError, SnapshotRefused) as error:
            reason = f"{choice.name} could not become round {self._context.round}'s first checkpoint: {error}"
            self._context.warn("checkpoint_failed", reason, self._directory / choice.name, choice.step)

    def _adopt_in_memory(self, choice: Choice) -> None:
        """The state in memory is this round's from now on, and rank 0's writer makes it a checkpoint of this round.

        A sharded one that was whole on its nodes is being written by them, or has been; others are saved again soon.
        """
        context, writer = self._context, self._context.writer
        if choice.copy_only_files:
            context.owed_reason = f"resumed from copies of {', '.join(choice.copy_only_files)}"
        if writer is None or writer.share != 0:
            return
        if choice.copy_only_files:
            writer.are_shards_pending(False, parts_s=0.0)
        ours = next((snapshot for snapshot in self._held if snapshot.key == choice.key), None)
        if ours is not None and choice.key[0] != context.round:
            # How many are kept the script says after `restore()`.
            task = (
                replace(context.write_task("resumed from memory", 0.0), keep=_KEEP_ALL)
                if context.group.rank == 0
                else None
            )
            writer.adopt(choice.key, ours.draft.relinked_to(context.round), task)

    def _lost_steps_notes(self, step: int) -> Notes:
        """Sentences, on rank 0, about what the round before has trained, as far as this node knows, and is lost."""
        round = self._context.environment.round - 1
        if self._goes_back or self._saver.is_later_session or round < 1 or "ELASTICD_HEARTBEAT" not in os.environ:
            return []
        last = step_files.last_step_on_node(round)  # of which there may have been more ranks
        if last <= step:
            return []
        steps = f"step {last} is" if last == step + 1 else f"steps {step + 1} to {last} are"
        return [f"{steps} trained again"]
