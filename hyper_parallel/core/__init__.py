"""What torch lacks: layouts (`dtensor/`) and sharded parameters (`fully_shard/`)."""
