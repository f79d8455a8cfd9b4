//! Merges pages with equal content: with a stable page, or with a page of the unstable index.
//!
//! Merging proceeds in rounds. A candidate that finds a partner in the unstable index does not join
//! it directly: the partner's content is published as a stable page, and in the next round the
//! candidate finds the stable page. Both are planned to be replaced by it, each independently, and
//! a failure leaves a page unchanged. Planned pages are replaced at the end of a step at the
//! latest, the pages of a block together.

use std::collections::{HashMap, HashSet};

use ebb_abi::{PAGE_SIZE_BYTES, Pfn};
use ebb_guest_ram::merge::MergeTarget;

use crate::{
    blocks::{Block, PageNumber, Readiness, block_of},
    domain::{Domain, Pass, Planned, StoreHealth},
    hash::PageHash,
    memory::{Memory, Node},
    record::{NodeNumber, Record, State},
    replace::pages_in_short_runs,
    store::{Answer, StableStore},
};

/// Bytes of a page.
const PAGE: usize = PAGE_SIZE_BYTES as usize;

/// Number of pages whose contents are read before they are published: few enough to be still in the
/// processor's cache when they are written.
const PUBLISHED_AT_ONCE: usize = 64;

/// Maximum number of pages that wait to be replaced together. Each may meanwhile hold a stable page
/// without sharers.
const PLANNED_AT_MOST: usize = 2048;

/// Of neighbouring pages with the same content, one in so many becomes a stable page, up to
/// [`most_copies`](crate::Settings::most_copies).
const PAGES_FOR_A_COPY: usize = 8;

/// A page that was unchanged for long enough, and its content.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    pub(crate) page: PageNumber,
    pub(crate) hash: PageHash,
    pub(crate) node: NodeNumber,
}

/// Result of reading pages.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// Pages of zeros to be discarded.
    pub(crate) zeros: Vec<PageNumber>,
    /// All others.
    pub(crate) others: Vec<Candidate>,
}

/// A page that is to become a stable page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Publish {
    page: PageNumber,
    hash: PageHash,
    node: NodeNumber,
    /// The candidate that found it.
    by: PageNumber,
}

impl Publish {
    /// A candidate that becomes a stable page itself.
    pub(crate) fn own(candidate: &Candidate) -> Self {
        let Candidate { page, hash, node } = *candidate;
        Self { page, hash, node, by: page }
    }
}

/// For each candidate, how many stable pages its content may get now: more than one within a run of
/// pages that have it, too.
fn copies(candidates: &[(Candidate, Answer)], most: usize) -> Vec<usize> {
    let is_same = |a: &(Candidate, Answer), b: &(Candidate, Answer)| {
        (a.0.page.wrapping_add(1), a.0.node, a.0.hash) == (b.0.page, b.0.node, b.0.hash)
    };
    let runs = candidates.chunk_by(is_same);
    runs.flat_map(|run| {
        std::iter::repeat_n((run.len() / PAGES_FOR_A_COPY).clamp(1, most), run.len())
    })
    .collect()
}

impl<M: Memory, S: StableStore> Domain<M, S> {
    /// Merges the pages found, as far as they have partners; the rest goes into the unstable index.
    pub(crate) fn join(&mut self, found: Found, pass: &Pass<'_>) {
        for page in found.zeros {
            self.plan(Planned { page, hash: PageHash::ZEROS, target: MergeTarget::Zero });
        }
        // A page of a block that has become huge may still be in the unstable index. It would be
        // found there as the partner of another candidate, and be planned a second time as itself.
        for candidate in &found.others {
            let record = self.blocks.record(candidate.page);
            if record.state() == State::Unshared {
                self.set_state(candidate.page, record.with(State::Watched, 0));
            }
        }
        let mut round = found.others;
        while !round.is_empty() {
            round = self.join_round(round, pass);
        }
        if self.planned.len() >= PLANNED_AT_MOST {
            self.replace_planned(pass);
        }
    }

    /// Returns the candidates whose partners may have become stable pages. Each round removes at
    /// least one page from the candidates or from the unstable index, so the rounds terminate.
    fn join_round(&mut self, round: Vec<Candidate>, pass: &Pass<'_>) -> Vec<Candidate> {
        let answers = self.ask(&round);
        let (mut publish, mut later) = (Vec::new(), Vec::new());
        let (mut pending, mut unanswered) = (HashMap::new(), Vec::new());
        for (candidate, answer) in round.into_iter().zip(answers) {
            match answer {
                Answer::Stable(slot) => {
                    let target = MergeTarget::Slot(slot);
                    self.plan(Planned { page: candidate.page, hash: candidate.hash, target });
                }
                Answer::Unknown | Answer::Wanted => unanswered.push((candidate, answer)),
            }
        }
        if self.health == StoreHealth::Late {
            for (candidate, _) in &unanswered {
                self.refuse(candidate);
            }
            return Vec::new();
        }
        let copies = copies(&unanswered, pass.settings.most_copies.into());
        for ((candidate, answer), most) in unanswered.into_iter().zip(copies) {
            let key = (candidate.node, candidate.hash);
            if let Some(published) = pending.get_mut(&key) {
                if *published < most {
                    *published += 1;
                    publish.push(Publish::own(&candidate));
                } else {
                    later.push(candidate);
                }
                continue;
            }
            let partner = self.readiest_partner(&candidate, pass);
            let is_ready = partner.is_some_and(|(readiness, _)| readiness >= Readiness::Willing);
            match (partner, answer) {
                _ if self.health != StoreHealth::Full && (is_ready || answer == Answer::Wanted) => {
                    self.refuse(&candidate);
                }
                (Some((_, partner)), _) if is_ready => {
                    self.will_split(block_of(partner));
                    publish.push(Publish {
                        page: partner,
                        hash: candidate.hash,
                        node: candidate.node,
                        by: candidate.page,
                    });
                    pending.insert(key, 1);
                    later.push(candidate);
                }
                (_, Answer::Wanted) => {
                    publish.push(Publish::own(&candidate));
                    pending.insert(key, 1);
                }
                (partner, _) => {
                    partner.inspect(|(_, partner)| self.note_wanted(*partner));
                    self.insert_unshared(candidate.page, candidate.hash, candidate.node);
                }
            }
        }
        if !self.publish(publish, pass) {
            for candidate in later.drain(..) {
                self.refuse(&candidate);
            }
        }
        later
    }

    /// The store's answer for each candidate; none if it fails.
    pub(crate) fn ask(&mut self, round: &[Candidate]) -> Vec<Answer> {
        let mut answers = vec![Answer::Unknown; round.len()];
        if matches!(self.health, StoreHealth::Late | StoreHealth::Gone) {
            return answers;
        }
        let mut nodes: Vec<NodeNumber> = round.iter().map(|candidate| candidate.node).collect();
        nodes.sort_unstable_by_key(|node| node.0);
        nodes.dedup();
        for number in nodes {
            let places: Vec<usize> =
                (0..round.len()).filter(|&place| round[place].node == number).collect();
            let hashes: Vec<PageHash> = places.iter().map(|&place| round[place].hash).collect();
            let node = self.nodes[usize::from(number.0)];
            let mut found = Vec::with_capacity(hashes.len());
            let outcome = self.store.query(node, &hashes, &mut found);
            for (&place, answer) in places.iter().zip(found) {
                answers[place] = answer;
            }
            if let Err(error) = outcome {
                self.note_store_error(&error);
                break;
            }
        }
        answers
    }

    /// The page of the unstable index with the candidate's content that can be merged most likely,
    /// where pages of its own block can.
    fn readiest_partner(
        &self,
        candidate: &Candidate,
        pass: &Pass<'_>,
    ) -> Option<(Readiness, PageNumber)> {
        let own = block_of(candidate.page);
        let mut readiest = None;
        self.unstable.get(usize::from(candidate.node.0))?.find(candidate.hash, |page| {
            if page == candidate.page || self.blocks.record(page).hash() != candidate.hash {
                return false;
            }
            let block = block_of(page);
            let readiness = match self.blocks.block(block) {
                Some(other) if block != own => other.readiness(pass.settings.huge_min_duplicates),
                _ => Readiness::Small,
            };
            readiest = readiest.max(Some((readiness, page)));
            readiness == Readiness::Small
        });
        readiest
    }

    /// Counts, in a huge page that is not worth splitting yet, a page of which another one with the
    /// same content was found.
    fn note_wanted(&mut self, partner: PageNumber) {
        if let Some(block) = self.blocks.block_mut(block_of(partner)) {
            block.reading.wanted = block.reading.wanted.saturating_add(1);
        }
    }

    /// Marks a candidate as not mergeable for now.
    fn refuse(&mut self, candidate: &Candidate) {
        let record = self.blocks.record(candidate.page).on(candidate.node);
        self.set_state(candidate.page, record.with(State::Refused, candidate.hash.get()));
    }

    /// Records that a huge page, if the block is one, is about to be split.
    fn will_split(&mut self, number: u32) {
        if let Some(block) = self.blocks.block_mut(number) {
            block.reading.split |= block.huge;
        }
    }

    /// Decides whether a huge page should be split, of which `found` was unchanged between the last
    /// two times it was read; if not, leaves these pages in the unstable index as partners of
    /// others.
    ///
    /// It is split if enough of its pages have partners outside of huge pages, or in huge pages
    /// that are [willing](Readiness::Willing). Those are willing that have enough partners in huge
    /// pages with enough duplicates. So what one huge page gains by being split does not cost many
    /// others of which little is merged.
    pub(crate) fn judge(&mut self, number: u32, found: &Found, pass: &Pass<'_>) -> bool {
        let mut duplicates = Vec::new();
        let mut seen = HashSet::new();
        let mut waiting = Vec::new();
        for (candidate, answer) in found.others.iter().zip(self.ask(&found.others)) {
            if let Answer::Stable(slot) = answer {
                self.store.unused(slot);
                duplicates.push((candidate.page, Readiness::Small));
            } else if answer == Answer::Wanted || !seen.insert((candidate.node, candidate.hash)) {
                duplicates.push((candidate.page, Readiness::Small));
            } else {
                waiting.push(*candidate);
            }
        }
        if self.health == StoreHealth::Late {
            // It is judged again some passes later.
            if let Some(block) = self.blocks.block_mut(number) {
                block.reading.due_in = pass.settings.huge_cold_passes;
            }
            return false;
        }
        let mut unready = Vec::new();
        for candidate in waiting {
            let partner = self.readiest_partner(&candidate, pass);
            duplicates.extend(partner.map(|(readiness, _)| (candidate.page, readiness)));
            if let Some((Readiness::Whole | Readiness::Wanted, partner)) = partner {
                unready.push((candidate.page, partner));
            }
        }
        let gain = |least: Readiness| {
            let pages = duplicates.iter().filter(|(_, readiness)| *readiness >= least);
            let pages = pages.map(|(page, _)| *page).collect();
            found.zeros.len() as u16 + self.pages_in_long_runs(pages)
        };
        if gain(Readiness::Willing) >= pass.settings.huge_min_duplicates {
            self.will_split(number);
            return true;
        }
        let wanted = gain(Readiness::Whole);
        let willing = gain(Readiness::Wanted) >= pass.settings.huge_min_duplicates;
        if let Some(block) = self.blocks.block_mut(number) {
            (block.reading.wanted, block.reading.willing) = (wanted, willing);
        }
        for (page, partner) in unready {
            // Counted once, however often it is read.
            if self.blocks.record(page).state() != State::Unshared {
                self.note_wanted(partner);
            }
        }
        for candidate in &found.others {
            self.insert_unshared(candidate.page, candidate.hash, candidate.node);
        }
        for &page in &found.zeros {
            let record = self.blocks.record(page);
            self.set_state(page, record.with(State::Refused, PageHash::ZEROS.get()));
        }
        false
    }

    /// How many of these pages of a block are in runs that would be replaced, where mappings are
    /// scarce.
    fn pages_in_long_runs(&self, mut pages: Vec<PageNumber>) -> u16 {
        pages.sort_unstable();
        let mut short = 0;
        let follows = |a: usize, b: usize| pages[a] + 1 == pages[b];
        pages_in_short_runs(pages.len(), follows, |_| self.min_run_pages, |_| short += 1);
        pages.len() as u16 - short
    }

    /// Publishes the content of pages and plans to replace them. Returns `false` if the store
    /// failed; pages that were not published stay unchanged.
    fn publish(&mut self, mut list: Vec<Publish>, pass: &Pass<'_>) -> bool {
        self.confirm_nodes(&mut list, pass);
        self.drop_short_runs(&mut list);
        let published = self.publish_all(&list, pass);
        for item in list[published..].iter().filter(|item| item.page == item.by) {
            self.refuse(&Candidate { page: item.page, hash: item.hash, node: item.node });
        }
        published == list.len()
    }

    /// Publishes the content of pages and plans to replace them, until the store fails. Returns the
    /// number of pages processed.
    pub(crate) fn publish_all(&mut self, list: &[Publish], pass: &Pass<'_>) -> usize {
        let places = self.places(list, pass);
        let mut done = 0;
        while done < list.len() {
            let same =
                |&item: &usize| (places[item], list[item].node) == (places[done], list[done].node);
            let most = list.len().min(done + PUBLISHED_AT_ONCE);
            let end = done + (done..most).take_while(same).count();
            if !self.publish_part(places[done], &list[done..end], pass) {
                break;
            }
            done = end;
        }
        done
    }

    /// The node on which each content is to be published: that of the page that has it, which is
    /// its first user.
    fn places(&mut self, list: &[Publish], pass: &Pass<'_>) -> Vec<Node> {
        if self.memory.is_on_one_node() && !pass.are_apart() {
            return vec![Node::ANY; list.len()];
        }
        let numbers = if pass.are_apart() {
            list.iter().map(|item| Some(item.node)).collect()
        } else {
            let pages: Vec<PageNumber> = list.iter().map(|item| item.page).collect();
            self.nodes_in_any_order(&pages)
        };
        let node = |number: NodeNumber| self.nodes.get(usize::from(number.0)).copied();
        numbers.into_iter().map(|number| number.and_then(node).unwrap_or(Node::ANY)).collect()
    }

    /// Publishes the content of a few pages on a node.
    fn publish_part(&mut self, node: Node, part: &[Publish], pass: &Pass<'_>) -> bool {
        // Reused from call to call: fresh memory of this size costs a fault for each page.
        let mut contents = std::mem::take(&mut self.contents);
        contents.resize(PUBLISHED_AT_ONCE * PAGE, 0);
        let mut readable = Vec::with_capacity(part.len());
        for item in part {
            let begin = readable.len() * PAGE;
            let content = &mut contents[begin..begin + PAGE];
            let pfn = self.blocks.pfn(item.page);
            let read = pfn.is_some_and(|pfn| self.memory.read(pfn, content).is_ok());
            // The content must have the hash under which it is published: the page may have changed
            // since it was hashed.
            if read && self.hasher.hash(content) == item.hash {
                readable.push(*item);
            } else {
                self.watch(item.page, pass);
            }
        }
        let hashes: Vec<PageHash> = readable.iter().map(|item| item.hash).collect();
        let mut slots = Vec::with_capacity(hashes.len());
        let outcome = match hashes.len() {
            0 => Ok(()),
            pages => self.store.publish(node, &hashes, &contents[..pages * PAGE], &mut slots),
        };
        self.contents = contents;
        match outcome {
            Ok(()) => {
                for (item, slot) in readable.iter().zip(slots) {
                    self.plan(Planned {
                        page: item.page,
                        hash: item.hash,
                        target: MergeTarget::Slot(slot),
                    });
                }
                true
            }
            Err(error) => {
                self.note_store_error(&error);
                false
            }
        }
    }

    /// Drops partners that have moved to another node since they were hashed, and moves them to the
    /// right index.
    fn confirm_nodes(&mut self, list: &mut Vec<Publish>, pass: &Pass<'_>) {
        if !pass.are_apart() {
            return;
        }
        let pages: Vec<PageNumber> = list.iter().map(|item| item.page).collect();
        let mut confirmed = self.nodes_in_any_order(&pages).into_iter();
        list.retain(|item| {
            let now = confirmed.next().flatten();
            if now == Some(item.node) {
                return true;
            }
            match now {
                Some(now) => self.insert_unshared(item.page, item.hash, now),
                None => self.set_state(item.page, Record::UNKNOWN),
            }
            false
        });
    }

    /// The present node of each page.
    fn nodes_in_any_order(&mut self, pages: &[PageNumber]) -> Vec<Option<NodeNumber>> {
        // The memory requires an ascending order.
        let mut order: Vec<(Pfn, usize)> = (0..pages.len())
            .filter_map(|place| Some((self.blocks.pfn(pages[place])?, place)))
            .collect();
        order.sort_unstable();
        let ascending: Vec<Pfn> = order.iter().map(|(pfn, _)| *pfn).collect();
        let mut nodes = vec![None; pages.len()];
        for ((_, place), node) in order.into_iter().zip(self.nodes_now(&ascending)) {
            nodes[place] = node;
        }
        nodes
    }

    /// Where mappings are scarce, drops short runs, on the side of the partners or of the pages
    /// that found them.
    fn drop_short_runs(&mut self, list: &mut Vec<Publish>) {
        let least = self.min_run_pages;
        if least <= 1 {
            return;
        }
        let mut short = vec![false; list.len()];
        for side in [|item: &Publish| item.page, |item: &Publish| item.by] {
            let places: Vec<Option<Pfn>> =
                list.iter().map(|item| self.blocks.pfn(side(item))).collect();
            // Neighbours in the list will get neighbouring slots.
            let follows = |a: usize, b: usize| match (places[a], places[b]) {
                (Some(first), Some(second)) => first.0 + 1 == second.0,
                _ => false,
            };
            pages_in_short_runs(list.len(), follows, |_| least, |place| short[place] = true);
        }
        let mut short = short.into_iter();
        list.retain(|item| {
            let keep = !short.next().unwrap_or(false);
            if !keep {
                self.counters.replaced_no_mappings += 1;
                self.refuse(&Candidate { page: item.page, hash: item.hash, node: item.node });
            }
            keep
        });
    }

    /// Retries pages for which other processes have made stable pages.
    pub(crate) fn take_notifications(&mut self, pass: &Pass<'_>) {
        let mut notifications = Vec::new();
        self.store.take_notifications(&mut notifications);
        let number = |node: Node| self.nodes.iter().position(|known| *known == node);
        let stable: Vec<(NodeNumber, PageHash)> = notifications
            .into_iter()
            .filter_map(|(node, hash)| Some((NodeNumber(number(node)? as u16), hash)))
            .collect();
        self.join_waiting(&stable, pass);
    }

    /// Joins the pages that wait for partners, and whose contents have stable pages by now.
    pub(crate) fn join_waiting(&mut self, stable: &[(NodeNumber, PageHash)], pass: &Pass<'_>) {
        let mut found = Vec::new();
        for &(node, hash) in stable {
            let mut pages = Vec::new();
            let Some(table) = self.unstable.get(usize::from(node.0)) else { continue };
            table.find(hash, |page| {
                if self.blocks.record(page).hash() == hash {
                    pages.push(page);
                }
                false
            });
            for page in pages {
                if self.blocks.block(block_of(page)).is_some_and(Block::is_huge_page) {
                    self.note_wanted(page);
                } else {
                    found.push(Publish { page, hash, node, by: page });
                }
            }
        }
        // A content may be named more than once.
        found.sort_unstable_by_key(|item| item.page);
        found.dedup_by_key(|item| item.page);
        self.confirm_nodes(&mut found, pass);
        let others = found
            .into_iter()
            .map(|item| Candidate { page: item.page, hash: item.hash, node: item.node })
            .collect();
        self.join(Found { zeros: Vec::new(), others }, pass);
    }
}
