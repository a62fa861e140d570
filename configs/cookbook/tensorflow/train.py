"""A training loop under MultiWorkerMirroredStrategy, which reads TF_CONFIG."""

import os

import tensorflow as tf


def main() -> None:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weights = tf.Variable(tf.zeros((8, 1)))

    @tf.function
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weights - tf.reduce_sum(x, 1, keepdims=True)))
        gradient = tf.distribute.get_replica_context().all_reduce("MEAN", tape.gradient(loss, weights))
        weights.assign_sub(0.1 * gradient)

    for _ in range(50):
        strategy.run(step, args=(tf.random.normal((32, 8)),))
    if os.environ["RANK"] == "0":
        print(f"tensorflow: ok, {strategy.num_replicas_in_sync} workers")


if __name__ == "__main__":
    main()
