//! The whole: domains, their members, and the way of the scan over all of them.

use crate::{
    domain::{Domain, Pass},
    memory::{Memory, Secret},
    settings::{Run, Settings, SettingsError},
    statistics::Statistics,
    store::StableStore,
};

/// A trust domain of a [`Merger`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DomainId(usize);

/// A member of a domain of a [`Merger`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemberId {
    domain: usize,
    member: usize,
}

/// What a step has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Pages looked at (or, with [`Run::Unmerge`], gone through).
    pub pages: u64,
    /// Of these, pages that may have been written to since they were last looked at.
    pub written: u64,
    /// A pass over all memory ended with this step (or all is unmerged).
    pub finished_pass: bool,
}

/// Merges equal pages of the members of each trust domain; never pages of different domains.
///
/// It belongs to one thread. See [`Worker`](crate::Worker) for a thread that paces itself and can
/// be talked to.
pub struct Merger<M, S> {
    domains: Vec<Option<Domain<M, S>>>,
    settings: Settings,
    /// What the advisor made of `settings.pages_to_scan`.
    pages_to_scan: u64,
    full_scans: u64,
    /// Where the scan goes on; `None` before a pass.
    cursor: Option<(usize, u32)>,
    /// Where unmerging goes on; `None` if there is nothing to be unmerged any more.
    unmerging: Option<(usize, u32)>,
}

impl<M: Memory, S: StableStore> Merger<M, S> {
    /// A merger without domains.
    pub fn new(settings: Settings) -> Result<Self, SettingsError> {
        settings.check()?;
        Ok(Self {
            domains: Vec::new(),
            pages_to_scan: settings.pages_to_scan,
            unmerging: (settings.run == Run::Unmerge).then_some((0, 0)),
            settings,
            full_scans: 0,
            cursor: None,
        })
    }

    /// Adds a trust domain with a store of stable pages of its own. `secret` must be the one that
    /// everybody hashes with who shares this store.
    pub fn add_domain(&mut self, mut store: S, secret: Secret) -> DomainId {
        store.limit_sharing(self.settings.max_page_sharing);
        self.domains.push(Some(Domain::new(store, secret)));
        DomainId(self.domains.len() - 1)
    }

    /// Adds memory to a domain; gives it back if there is no such domain, or if the domain has 16
    /// TiB already.
    pub fn add_member(&mut self, domain: DomainId, memory: M) -> Result<MemberId, M> {
        match self.domains.get_mut(domain.0).and_then(Option::as_mut) {
            Some(found) => {
                found.add_member(memory).map(|member| MemberId { domain: domain.0, member })
            }
            None => Err(memory),
        }
    }

    /// Removes a member whose memory is about to go away (its pages need no content any more) and
    /// gives up its shares. Returns the memory, and whether it could name all of them: if not, some
    /// stable pages stay in use for good.
    pub fn remove_member(&mut self, id: MemberId) -> Option<(M, Result<(), M::Error>)> {
        self.domains.get_mut(id.domain)?.as_mut()?.remove_member(id.member)
    }

    /// Removes a domain without members and returns its store; `None` if it has any.
    pub fn remove_domain(&mut self, id: DomainId) -> Option<S> {
        let place = self.domains.get_mut(id.0)?;
        if place.as_ref()?.members.iter().any(Option::is_some) {
            return None;
        }
        place.take().map(|domain| domain.store)
    }

    /// A member's memory.
    pub fn memory(&self, id: MemberId) -> Option<&M> {
        self.domains
            .get(id.domain)?
            .as_ref()?
            .members
            .get(id.member)?
            .as_ref()
            .map(|member| &member.memory)
    }

    /// A member's memory.
    pub fn memory_mut(&mut self, id: MemberId) -> Option<&mut M> {
        let domain = self.domains.get_mut(id.domain)?.as_mut()?;
        domain.members.get_mut(id.member)?.as_mut().map(|member| &mut member.memory)
    }

    /// A domain's store.
    pub fn store(&self, id: DomainId) -> Option<&S> {
        self.domains.get(id.0)?.as_ref().map(|domain| &domain.store)
    }

    /// A domain's store.
    pub fn store_mut(&mut self, id: DomainId) -> Option<&mut S> {
        self.domains.get_mut(id.0)?.as_mut().map(|domain| &mut domain.store)
    }

    /// The settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Changes the settings; all of them or none. What decides which pages may share can be changed
    /// only while nothing is merged, and everything that was known about pages is forgotten then.
    pub fn change(&mut self, settings: Settings) -> Result<(), SettingsError> {
        settings.check()?;
        let decisive = self.settings.decides_sharing(&settings);
        if let Some(setting) = decisive {
            // What the owners have discarded is not merged any more.
            self.domains.iter_mut().flatten().for_each(|domain| {
                (0..domain.members.len()).for_each(|member| domain.take_released(member));
            });
            let statistics = self.statistics();
            let merged_pages = statistics.merged_pages.max(statistics.pages_shared);
            if merged_pages > 0 {
                return Err(SettingsError::Merged { setting, merged_pages });
            }
            for domain in self.domains.iter_mut().flatten() {
                domain.forget_all();
                domain.store.limit_sharing(settings.max_page_sharing);
            }
            self.cursor = None;
        }
        if settings.run == Run::Unmerge && self.settings.run != Run::Unmerge {
            self.unmerging = Some((0, 0));
        }
        if settings.use_zero_pages && !self.settings.use_zero_pages {
            self.domains.iter_mut().flatten().for_each(Domain::watch_zeros);
        }
        if settings.pages_to_scan != self.settings.pages_to_scan
            || settings.advisor_mode != self.settings.advisor_mode
        {
            self.pages_to_scan = settings.pages_to_scan;
        }
        self.settings = settings;
        Ok(())
    }

    /// How many pages a step should take.
    pub fn pages_to_scan(&self) -> u64 {
        self.pages_to_scan
    }

    /// Sets how many pages a step should take, without touching the settings (for the advisor).
    pub fn advise(&mut self, pages_to_scan: u64) {
        self.pages_to_scan = pages_to_scan.max(1);
    }

    /// Does what [`Settings::run`] says, for about `pages` pages.
    pub fn step(&mut self, pages: u64) -> Step {
        match self.settings.run {
            Run::Stop => Step::default(),
            Run::Merge => self.scan(pages),
            Run::Unmerge => self.unmerge(pages),
        }
    }

    /// Looks at about `pages` pages (whole blocks of 512), beginning where the last call stopped,
    /// and at most until the pass over all memory ends.
    pub fn scan(&mut self, pages: u64) -> Step {
        let pass = Pass { number: self.full_scans, settings: &self.settings };
        let begins = self.cursor.is_none();
        for domain in self.domains.iter_mut().flatten() {
            if begins {
                domain.begin_pass(&pass);
            }
            domain.hear_news(&pass);
            domain.replace_planned(&pass);
        }
        let (mut number, mut block) = self.cursor.unwrap_or((0, 0));
        let mut step = Step::default();
        while let Some(place) = self.domains.get_mut(number) {
            match place {
                Some(domain) if block < domain.blocks.len() => {
                    if step.pages >= pages {
                        domain.replace_planned(&pass);
                        self.cursor = Some((number, block));
                        return step;
                    }
                    let written = domain.counters.written_pages;
                    step.pages += domain.scan_block(block, &pass);
                    step.written += domain.counters.written_pages - written;
                    block += 1;
                }
                place => {
                    if let Some(domain) = place {
                        domain.replace_planned(&pass);
                    }
                    (number, block) = (number + 1, 0);
                }
            }
        }
        self.cursor = None;
        self.full_scans += 1;
        step.finished_pass = true;
        step
    }

    /// Gives merged pages pages of their own again, for about `pages` pages of memory, beginning
    /// where the last call stopped. With the end of it everything that was known about pages is
    /// forgotten. What fails is tried again with the next call.
    pub fn unmerge(&mut self, pages: u64) -> Step {
        let Some((mut number, mut block)) = self.unmerging else {
            return Step { finished_pass: true, ..Step::default() };
        };
        self.cursor = None;
        let mut step = Step::default();
        while let Some(place) = self.domains.get_mut(number) {
            match place {
                Some(domain) if block < domain.blocks.len() => {
                    if step.pages >= pages {
                        self.unmerging = Some((number, block));
                        return step;
                    }
                    if let Err(error) = domain.unmerge_block(block) {
                        domain.note_memory_error(&error);
                        self.unmerging = Some((number, block));
                        return step;
                    }
                    step.pages += domain.blocks.block(block).map_or(0, |block| block.range.pages);
                    block += 1;
                }
                _ => (number, block) = (number + 1, 0),
            }
        }
        self.unmerging = None;
        step.finished_pass = true;
        step
    }

    /// What was found and done, in all domains.
    pub fn statistics(&self) -> Statistics {
        let mut statistics = Statistics {
            full_scans: self.full_scans,
            pages_to_scan: self.pages_to_scan,
            ..Statistics::default()
        };
        self.domains.iter().flatten().for_each(|domain| domain.add_to(&mut statistics));
        statistics
    }

    /// What was found and done in one domain.
    pub fn domain_statistics(&self, id: DomainId) -> Option<Statistics> {
        let mut statistics = Statistics {
            full_scans: self.full_scans,
            pages_to_scan: self.pages_to_scan,
            ..Statistics::default()
        };
        self.domains.get(id.0)?.as_ref()?.add_to(&mut statistics);
        Some(statistics)
    }

    /// The last error of a store or a memory, if there was any.
    pub fn last_error(&self) -> Option<&str> {
        self.domains.iter().flatten().find_map(|domain| domain.last_error.as_deref())
    }
}
