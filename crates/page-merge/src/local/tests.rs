use super::*;
use crate::testing::World;

fn hash(number: u64) -> PageHash {
    PageHash::new(number)
}

fn store(world: &World) -> LocalStore<crate::testing::SimSlots> {
    LocalStore::new(world.slots(0))
}
