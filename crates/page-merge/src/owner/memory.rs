//! Guest memory of this process as the core sees it.

use std::sync::Arc;

use ebb_abi::{PageRange, Pfn};
use ebb_guest_ram::merge::{MergeOutcome, MergeTarget, PageLook};
use ebb_guest_ram::{GuestRam, MergeError, MergeSession, MergeUnavailable, StableSlot};

use crate::hash::PageHasher;
use crate::memory::{Content, Look, Memory, Node, Replace, Replaced, Returns, Secret, Target};
use crate::store::Slot;

/// The memory of a machine of this process. There can be one for each memory at a time.
#[derive(Debug)]
pub struct OwnerMemory {
    session: MergeSession,
    /// The hasher of the last secret, so that it is not made again for each page.
    hasher: Option<(Secret, PageHasher)>,
    looks: Vec<PageLook>,
    outcomes: Vec<MergeOutcome>,
    slots: Vec<StableSlot>,
}

impl OwnerMemory {
    /// The memory `ram`, for which [`GuestRam::enable_merging`] was called. Opens a file in /proc.
    ///
    /// # Errors
    /// [`MergeUnavailable`]: merging was not enabled, or somebody merges this memory already.
    pub fn new(ram: Arc<GuestRam>) -> Result<Self, MergeUnavailable> {
        Ok(Self {
            session: MergeSession::new(ram)?,
            hasher: None,
            looks: Vec::new(),
            outcomes: Vec::new(),
            slots: Vec::new(),
        })
    }

    /// The memory.
    pub fn ram(&self) -> &GuestRam {
        self.session.ram()
    }

    fn take_slots(&mut self, slots: &mut Vec<Slot>) {
        slots.extend(self.slots.drain(..).map(Slot::from));
    }
}

impl Memory for OwnerMemory {
    type Error = MergeError;

    fn ranges(&self) -> Vec<PageRange> {
        self.ram().page_ranges()
    }

    fn look(&mut self, block: PageRange, looks: &mut Vec<Look>) -> Result<(), MergeError> {
        self.session.look(block, &mut self.looks)?;
        looks.clear();
        looks.extend(self.looks.iter().map(|look| match *look {
            PageLook::Absent => Look::Absent,
            PageLook::Written => Look::Written,
            PageLook::Clean => Look::Clean,
            PageLook::Merged => Look::Merged,
            PageLook::Broken(slot) => Look::Broken(slot.into()),
            PageLook::HugeClean => Look::HugeClean,
            PageLook::HugeWritten => Look::HugeWritten,
            PageLook::Copied => Look::Copied,
            PageLook::Excluded => Look::Excluded,
        }));
        Ok(())
    }

    fn hash(
        &mut self,
        pages: &[Pfn],
        secret: &Secret,
        contents: &mut Vec<Option<Content>>,
    ) -> Result<(), MergeError> {
        if self.hasher.as_ref().is_none_or(|(of, _)| of != secret) {
            self.hasher = Some((*secret, PageHasher::new(secret)));
        }
        let hasher = self.hasher.as_ref().map(|(_, hasher)| hasher);
        self.session.read_each(pages, |page| {
            contents.push(page.zip(hasher).map(|(page, hasher)| hasher.content(page)));
        });
        Ok(())
    }

    fn nodes(&mut self, pages: &[Pfn], nodes: &mut Vec<Option<Node>>) -> Result<(), MergeError> {
        let mut numbers = Vec::with_capacity(pages.len());
        self.session.nodes(pages, &mut numbers)?;
        nodes.extend(numbers.into_iter().map(|number| number.map(Node)));
        Ok(())
    }

    fn read(&mut self, page: Pfn, content: &mut [u8]) -> Result<(), MergeError> {
        let mut result = Ok(());
        self.session.read_each(&[page], |read| match read {
            Some(page) => content.copy_from_slice(page),
            None => result = Err(MergeError::OutsideRam { range: PageRange::new(page, 1) }),
        });
        result
    }

    fn replace(
        &mut self,
        pages: &[Replace],
        replaced: &mut Vec<Replaced>,
    ) -> Result<(), MergeError> {
        let target = |target| match target {
            Target::Zero => MergeTarget::Zero,
            Target::Slot(slot) => MergeTarget::Slot(slot.into()),
        };
        let pages: Vec<_> =
            pages.iter().map(|replace| (replace.page, target(replace.target))).collect();
        self.outcomes.clear();
        let result = self.session.replace(&pages, &mut self.outcomes);
        // After an error too: what was replaced must be known.
        replaced.extend(self.outcomes.iter().map(|outcome| match outcome {
            MergeOutcome::Done => Replaced::Done,
            MergeOutcome::Different => Replaced::Different,
            MergeOutcome::Busy => Replaced::Busy,
            MergeOutcome::NoMappings => Replaced::NoMappings,
            MergeOutcome::Gone => Replaced::Gone,
        }));
        result
    }

    fn unmerge(&mut self, range: PageRange, released: &mut Vec<Slot>) -> Result<(), MergeError> {
        let result = self.session.unmerge(range, &mut self.slots);
        self.take_slots(released);
        result
    }

    fn abandon(&mut self, range: PageRange, released: &mut Vec<Slot>) -> Result<(), MergeError> {
        self.session.abandon(range, &mut self.slots);
        self.take_slots(released);
        Ok(())
    }

    fn returns(&self) -> Returns {
        let returns = self.ram().returns();
        Returns {
            brought_back_pages: returns.brought_back_pages,
            remerged_pages: returns.remerged_pages,
        }
    }

    fn take_released(&mut self, released: &mut Vec<Slot>) {
        self.session.take_released(&mut self.slots);
        self.take_slots(released);
    }
}
