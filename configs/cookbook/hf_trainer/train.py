"""The Trainer of Hugging Face transformers, on a tiny GPT-2 built from its config."""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences of tokens that count up."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + index) % 64
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    arguments = TrainingArguments(
        output_dir="runs/hf_trainer",
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        per_device_train_batch_size=8,
        num_train_epochs=2,
        save_strategy="no",
        report_to="none",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
    trainer.train()
    if trainer.is_world_process_zero():
        print(f"hf_trainer: ok, {arguments.world_size} ranks, {trainer.state.global_step} steps")


if __name__ == "__main__":
    main()
