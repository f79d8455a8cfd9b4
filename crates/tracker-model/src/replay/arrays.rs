//! The arrays of tracker `percpu`, as a recording shows them.

use std::collections::{BTreeMap, BTreeSet};

use super::problem::Problem;
use crate::recording::ArrayEvent;
use crate::units::{Block, Order, Pfn};

/// Hooks that can be interrupted by another one on the same CPU: a task's, a soft interrupt's, an
/// interrupt's, and one to spare.
const NESTED_MAX: usize = 4;

/// The array of a CPU.
///
/// What a scan leaves depends on a look at the free lists without a lock. So it is not predicted,
/// and a page stands for the largest block around it: in whatever free block the tracker found it,
/// and whatever that was split or merged into since, is in there.
#[derive(Clone, Debug, Default)]
struct Array {
    used: u32,
    full: bool,
    /// Its thread has been told to take it.
    due: bool,
    /// A scan has left so many that the next event has to be that it is full.
    is_to_be_full: bool,
    /// Freed, and not in the array or lost yet.
    freed: Vec<Block>,
    /// The last one that was freed before the tracker was said to run.
    freed_early: Option<Block>,
    written: BTreeSet<Pfn>,
    /// The last entry, until the array is scanned or taken.
    last: Option<Pfn>,
    taken: BTreeSet<Pfn>,
}

/// The arrays of all CPUs.
#[derive(Clone, Debug)]
pub struct Arrays {
    size: u32,
    /// The hook is in place: it sees each free, and nothing else.
    is_hooked: bool,
    by_cpu: BTreeMap<u32, Array>,
}

fn around(block: Block) -> Pfn {
    Block::containing(block.first, Order::LARGEST).first
}

impl Arrays {
    /// Empty arrays of so many entries.
    pub fn new(size: u32) -> Self {
        Self { size, is_hooked: false, by_cpu: BTreeMap::new() }
    }

    /// The hook is in place from now on, or only until now.
    pub fn set_hooked(&mut self, is_hooked: bool) {
        self.is_hooked = is_hooked;
    }

    /// The hook is about to be called.
    pub fn freed(&mut self, cpu: u32, block: Block) -> Result<(), Problem> {
        let array = self.by_cpu.entry(cpu).or_default();
        if !self.is_hooked {
            array.freed_early = Some(block);
            return Ok(());
        }
        let freed = &mut array.freed;
        if let Some(&missed) = freed.first()
            && freed.len() == NESTED_MAX
        {
            return Err(Problem::FreeMissed(missed));
        }
        freed.push(block);
        Ok(())
    }

    /// The hook has written a block down.
    pub fn captured(&mut self, cpu: u32, block: Block) -> Result<(), Problem> {
        let size = self.size;
        let array = self.by_cpu.entry(cpu).or_default();
        array.end_hook(block, self.is_hooked)?;
        if array.full || array.is_to_be_full || array.used >= size {
            return Err(Problem::ArrayFull);
        }
        array.used += 1;
        array.written.insert(around(block));
        array.last = Some(around(block));
        Ok(())
    }

    /// The hook has found that the last entry stands for a block.
    pub fn again(&mut self, cpu: u32, block: Block) -> Result<(), Problem> {
        let array = self.by_cpu.entry(cpu).or_default();
        array.end_hook(block, self.is_hooked)?;
        if array.last == Some(around(block)) { Ok(()) } else { Err(Problem::NotCaptured(block)) }
    }

    /// The hook has found the array full.
    pub fn lost(&mut self, cpu: u32, block: Block) -> Result<(), Problem> {
        let array = self.by_cpu.entry(cpu).or_default();
        array.end_hook(block, self.is_hooked)?;
        if array.full { Ok(()) } else { Err(Problem::ArrayNotFull) }
    }

    /// Something else has happened to an array.
    pub fn changed(&mut self, cpu: u32, event: ArrayEvent, entries: u32) -> Result<(), Problem> {
        let size = self.size;
        let array = self.by_cpu.entry(cpu).or_default();
        let expected = |expected: u32| {
            if entries == expected {
                Ok(())
            } else {
                Err(Problem::Entries { expected, recorded: entries })
            }
        };
        match event {
            ArrayEvent::Scan => {
                if array.full || array.is_to_be_full || array.used != size || entries > size {
                    return Err(Problem::Entries { expected: array.used, recorded: entries });
                }
                array.used = entries;
                array.last = None;
                array.is_to_be_full = entries > size - size / 8;
            }
            ArrayEvent::Full => {
                expected(array.used)?;
                if !array.is_to_be_full {
                    return Err(Problem::ArrayNotFull);
                }
                array.full = true;
                array.due = true;
                array.is_to_be_full = false;
            }
            ArrayEvent::Flush => {
                expected(array.used)?;
                if array.due || array.used == 0 {
                    return Err(Problem::NothingToFlush);
                }
                array.due = true;
            }
            ArrayEvent::Turn => {
                expected(array.used)?;
                if !array.due {
                    return Err(Problem::ArrayNotDue);
                }
                // The thread does not run inside a hook.
                if let Some(&missed) = array.freed.first()
                    && self.is_hooked
                {
                    return Err(Problem::FreeMissed(missed));
                }
                array.full = false;
                array.due = false;
                array.used = 0;
                array.last = None;
                array.taken = std::mem::take(&mut array.written);
            }
        }
        Ok(())
    }

    /// Whether the thread of a CPU has anything to isolate a block for.
    pub fn isolated(&self, cpu: u32, block: Block) -> Result<(), Problem> {
        let array = self.by_cpu.get(&cpu);
        if array.is_some_and(|array| array.taken.contains(&around(block))) {
            Ok(())
        } else {
            Err(Problem::NotCaptured(block))
        }
    }
}

impl Array {
    /// Hooks that interrupt each other end in the opposite order.
    fn end_hook(&mut self, block: Block, is_hooked: bool) -> Result<(), Problem> {
        if self.freed.last() == Some(&block) {
            self.freed.pop();
        } else if is_hooked && self.freed_early.take() != Some(block) {
            return Err(Problem::NotFreed(block));
        }
        Ok(())
    }
}
