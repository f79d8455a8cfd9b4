//! A machine's memory, its store of stable pages, and the position of the scan.

use crate::{
    domain::{Domain, Pass},
    hash::Secret,
    memory::{BLOCK_PAGES, Memory},
    settings::{Run, Settings, SettingsError},
    statistics::Statistics,
    store::StableStore,
};

/// Reason why pages cannot be merged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MergerError {
    /// The settings are invalid.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The memory has more pages than can be numbered: the limit is 16 TiB, less if its regions do
    /// not begin at multiples of 2 MiB.
    #[error("guest memory is too large to be merged")]
    TooLarge,
}

/// Result of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Pages scanned (or, with [`Run::Unmerge`], processed).
    pub pages: u64,
    /// Of these, pages that may have been written to since their last scan.
    pub written: u64,
    /// A pass over all memory ended with this step (or unmerging is complete).
    pub finished_pass: bool,
}

/// Merges equal pages of a machine with each other, and with those of other machines that use the
/// same store of stable pages. A store belongs to one trust domain.
///
/// It belongs to one thread. See [`Worker`](crate::Worker) for a thread that paces itself and can
/// be controlled by others.
pub struct Merger<M, S> {
    domain: Domain<M, S>,
    settings: Settings,
    full_scans: u64,
    /// The block where the scan continues; `None` before a pass.
    cursor: Option<u32>,
    /// Pages that the present pass has scanned so far, and that the one before had.
    pass_pages: u64,
    last_pass_pages: Option<u64>,
    /// The block where unmerging continues; `None` if there is nothing left to unmerge.
    unmerging: Option<u32>,
}

impl<M: Memory, S: StableStore> Merger<M, S> {
    /// Merges the pages of `memory`. `secret` must be the one with which all users of this store
    /// hash.
    ///
    /// # Errors
    /// [`MergerError`]
    pub fn new(
        memory: M,
        mut store: S,
        secret: Secret,
        settings: Settings,
    ) -> Result<Self, MergerError> {
        settings.check()?;
        store.limit_sharing(settings.max_page_sharing);
        store.merge_across_nodes(settings.merge_across_nodes);
        Ok(Self {
            domain: Domain::new(memory, store, &secret).ok_or(MergerError::TooLarge)?,
            unmerging: (settings.run == Run::Unmerge).then_some(0),
            settings,
            full_scans: 0,
            cursor: None,
            pass_pages: 0,
            last_pass_pages: None,
        })
    }

    /// The store of stable pages.
    pub fn store(&self) -> &S {
        &self.domain.store
    }

    /// The store of stable pages.
    pub fn store_mut(&mut self) -> &mut S {
        &mut self.domain.store
    }

    /// The settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Changes the settings; all of them or none. Settings that decide which pages may share can be
    /// changed only while no page is merged, and all records of pages are reset then.
    pub fn change(&mut self, settings: Settings) -> Result<(), SettingsError> {
        settings.check()?;
        let decisive = self.settings.decides_sharing(&settings);
        if let Some(setting) = decisive {
            // Pages that the owner has discarded are no longer merged.
            self.domain.take_released();
            let statistics = self.statistics();
            let merged_pages = statistics.merged_pages.max(statistics.pages_shared);
            if merged_pages > 0 {
                return Err(SettingsError::Merged { setting, merged_pages });
            }
            self.domain.forget_all();
            self.domain.store.limit_sharing(settings.max_page_sharing);
            self.domain.store.merge_across_nodes(settings.merge_across_nodes);
            self.cursor = None;
        }
        if settings.run == Run::Unmerge && self.settings.run != Run::Unmerge {
            self.unmerging = Some(0);
        }
        if settings.use_zero_pages && !self.settings.use_zero_pages {
            self.domain.watch_zeros();
        }
        self.settings = settings;
        Ok(())
    }

    /// Uses another store of stable pages from now on, for instance because the one used so far is
    /// lost. `secret` is the one with which all users of the new store hash. The numbers of its
    /// segments must be higher than those of all stores before.
    ///
    /// Merged pages stay merged: their shares are moved to stable pages of the new store, a
    /// sixteenth of the memory in each pass.
    pub fn renew(&mut self, mut store: S, secret: Secret) {
        store.limit_sharing(self.settings.max_page_sharing);
        store.merge_across_nodes(self.settings.merge_across_nodes);
        self.domain.renew(store, &secret);
    }

    /// Number of pages that a pass scans, as far as it is known: those of the one before, or more
    /// if this one has scanned more by now. Memory that the host does not have is not scanned.
    pub fn pages_of_a_pass(&self) -> u64 {
        self.last_pass_pages.map_or(self.domain.blocks.pages(), |last| last.max(self.pass_pages))
    }

    /// Executes [`Settings::run`] for about `pages` pages.
    pub fn step(&mut self, pages: u64) -> Step {
        match self.settings.run {
            Run::Stop => Step::default(),
            Run::Merge => self.scan(pages),
            Run::Unmerge => self.unmerge(pages),
        }
    }

    /// Scans about `pages` pages (whole blocks of 512), continuing where the last call stopped, and
    /// at most until the pass over all memory ends. Up to 1 GiB that does not exist, and of which
    /// nothing is known, counts as one block.
    pub fn scan(&mut self, pages: u64) -> Step {
        let pass = Pass { number: self.full_scans, settings: &self.settings };
        let domain = &mut self.domain;
        if self.cursor.is_none() {
            domain.begin_pass(&pass);
            self.pass_pages = 0;
        }
        domain.take_notifications(&pass);
        domain.replace_planned(&pass);
        let mut block = self.cursor.unwrap_or(0);
        let mut step = Step::default();
        let written = domain.counters.written_pages;
        while block < domain.blocks.len() && step.pages < pages {
            let next = domain.after_absent(block);
            if next > block {
                // It costs as much as a block at most.
                step.pages += BLOCK_PAGES;
                block = next;
            } else {
                step.pages += domain.scan_block(block, &pass);
                block += 1;
            }
        }
        self.pass_pages += step.pages;
        domain.replace_planned(&pass);
        step.written = domain.counters.written_pages - written;
        step.finished_pass = block >= domain.blocks.len();
        self.cursor = (!step.finished_pass).then_some(block);
        self.full_scans += u64::from(step.finished_pass);
        if step.finished_pass {
            self.last_pass_pages = Some(self.pass_pages);
        }
        step
    }

    /// Unmerges pages, for about `pages` pages of memory, continuing where the last call stopped.
    /// At the end all records of pages are reset. Failures are retried with the next call.
    pub fn unmerge(&mut self, pages: u64) -> Step {
        let mut step = Step::default();
        self.cursor = None;
        while let Some(number) = self.unmerging {
            let Some(block) = self.domain.blocks.block(number) else {
                self.unmerging = None;
                break;
            };
            if step.pages >= pages {
                return step;
            }
            let block_pages = block.range.pages;
            if let Err(error) = self.domain.unmerge_block(number) {
                self.domain.note_memory_error(&error);
                return step;
            }
            step.pages += block_pages;
            self.unmerging = Some(number + 1);
        }
        step.finished_pass = true;
        step
    }

    /// The statistics.
    pub fn statistics(&self) -> Statistics {
        Statistics { full_scans: self.full_scans, ..self.domain.statistics() }
    }

    /// Most recent error of the store or the memory, if it is recent.
    pub fn last_error(&self) -> Option<&str> {
        self.domain.last_error.as_deref()
    }
}
