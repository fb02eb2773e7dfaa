"""Small training scripts on other people's trainers, made of what those libraries ship; `python loops.py NAME ...`.

They print the sum of the final weights; BIREME_RUN makes them observed, SLOW_MS makes rank 1 slow in its backward pass.
"""

import os
import sys
import time
from typing import Any

import torch

STEPS = 40


def slow_backward(module: Any, inputs: Any, output: Any) -> None:
    """A forward hook: the gradient of what the module gives comes late on rank 1."""
    delay_ms = float(os.environ.get("SLOW_MS", "0"))
    if delay_ms and os.environ.get("RANK") == "1" and output.requires_grad:
        output.register_hook(lambda _: time.sleep(delay_ms / 1e3))


def checksum(model: Any) -> str:
    return repr(sum(each.detach().double().sum().item() for each in model.parameters()))


def lightning(run: str | None) -> str:
    import lightning.pytorch as pl
    from lightning.pytorch.demos.boring_classes import BoringModel

    callbacks: list[Any] = []
    if run:
        from bireme.integrations.lightning import BiremeCallback

        callbacks = [BiremeCallback(run, tokens=len)]
    torch.manual_seed(0)
    model = BoringModel()
    model.layer.register_forward_hook(slow_backward)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=1,
        limit_train_batches=STEPS,
        limit_val_batches=1,
        val_check_interval=STEPS // 2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=sys.argv[2],
        callbacks=callbacks,
    )
    trainer.fit(model)
    return checksum(model)


def transformers(run: str | None) -> str:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    callbacks: list[Any] = []
    if run:
        from bireme.integrations.transformers import BiremeCallback

        callbacks = [BiremeCallback(run, sequence_length=32)]
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=1))
    model.lm_head.register_forward_hook(slow_backward)
    tokens = torch.randint(0, 64, (64, 32), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        sys.argv[2],
        per_device_train_batch_size=2,
        max_steps=STEPS,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        eval_strategy="steps",
        eval_steps=STEPS // 2,
        save_steps=STEPS // 2,
        disable_tqdm=True,
    )
    data: Any = [{"input_ids": each, "labels": each} for each in tokens]
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks)
    trainer.train()
    return checksum(model)


def accelerate(run: str | None) -> str:
    from accelerate import Accelerator
    from accelerate.test_utils.training import RegressionDataset, RegressionModel
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    # Its two numbers are vectors of their own kind of model; the loader gives dictionaries.
    model = RegressionModel()
    model.register_forward_hook(slow_backward)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(RegressionDataset(length=STEPS * 4, seed=0), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    monitor = None
    if run:
        import bireme

        monitor = bireme.Monitor(run, model=model, optimizer=optimizer)
    for batch in monitor.batches(loader) if monitor else loader:
        if monitor:
            with monitor.step(tokens=len(batch["x"])):
                regression_step(accelerator, model, optimizer, batch)
        else:
            regression_step(accelerator, model, optimizer, batch)
    total = checksum(model)
    accelerator.end_training()
    return total


def regression_step(accelerator: Any, model: Any, optimizer: Any, batch: Any) -> None:
    loss = (model(batch["x"]) - batch["y"]).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def plain(run: str | None) -> str:
    """No word of bireme: `bireme run` observes it. PyTorch's DDP tutorial has the same parts, and imports."""
    from torch.distributed import destroy_process_group, init_process_group
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    model[0].register_forward_hook(slow_backward)
    data = TensorDataset(torch.rand(STEPS * 8, 20), torch.rand(STEPS * 8, 1))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    for source, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(ddp(source), targets)
        loss.backward()
        optimizer.step()
    total = checksum(model)
    destroy_process_group()
    return total


def main() -> None:
    torch.set_num_threads(1)
    loop = {each.__name__: each for each in (lightning, transformers, accelerate, plain)}[sys.argv[1]]
    total = loop(os.environ.get("BIREME_RUN"))
    os.write(1, f"rank {os.environ['RANK']} weights {total}\n".encode())  # in one piece: both ranks write to one pipe
    if "bireme" not in sys.modules:
        os._exit(0)  # PyTorch itself aborts now and then when a process ends after its groups ("terminate called")


if __name__ == "__main__":
    main()
