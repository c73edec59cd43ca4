"""The same with a Session and an attached checkpoint: what takes longer is said, and training goes on where it was."""

from __future__ import annotations

from datetime import timedelta

import mishaps
import torch
import toy
from torch.nn.parallel import DistributedDataParallel

import elasticd


class Slow:
    """A part of the checkpoint that may be hard to save."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        mishaps.at("save", self.step)
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        mishaps.at("restore", 0)
        self.step = state["step"]


def main() -> None:
    args = toy.arguments()
    mishaps.at("start", 0)
    session = elasticd.init(timeout=timedelta(seconds=args.timeout))
    ddp = DistributedDataParallel(toy.model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    mishaps.step_again.append(session.step)
    toy.make_groups(args)
    slow = Slow()
    session.attach(model=ddp, optimizer=optimizer, slow=slow)
    session.restore()
    session.checkpoint(every=args.every)
    enough = False
    for step, batch in toy.batches(session.steps + 1, args):
        toy.gradients(ddp, batch, args)
        enough = args.late or toy.metric(step)
        optimizer.step()
        optimizer.zero_grad()
        slow.step = step
        session.step()
        mishaps.finished(step)
        if step % 10 == 0:
            with session.phase("eval"):
                mishaps.at("evaluate", step)
            if args.meet:
                mishaps.at("meet", step)
                session.barrier("every tenth", timeout=args.meet)
        if session.should_stop or (enough and (not args.late or toy.metric(step))):
            break
    toy.end()


if __name__ == "__main__":
    main()
