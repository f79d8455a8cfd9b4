//! The domains of a broker, and the requests of their clients. A client's requests reach the ledger
//! of its domain only.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;

use ebb_guest_ram::merge::StableBound;
use ebb_guest_ram::{StableMemory, StableSegments, StableSlot};

use crate::hash::{PageHasher, Secret};
use crate::memory::Node;
use crate::settings::Nodes;
use crate::store::Answer;

use super::error::Refusal;
use super::hello::{Hello, Welcome};
use super::ledger::{Ledger, MemberId, NoRoom};
use super::limits::{BATCH_NOTIFICATIONS, Limits, ToldLimits};
use super::message::{BATCH_CLOSED, Reply, Request};
use super::name::{DomainName, DomainRule};
use super::status::{DomainStatus, NodeStatus};

/// All domains.
#[derive(Debug)]
pub(super) struct Domains {
    rules: Vec<DomainRule>,
    limits: Limits,
    /// The host's nodes with memory.
    nodes: Vec<u32>,
    /// The broker's own user.
    user: u32,
    /// Bounds the memory files of all domains.
    all_pages: Arc<StableBound>,
    by_name: BTreeMap<DomainName, Domain>,
}

#[derive(Debug)]
struct Domain {
    ledger: Ledger<StableMemory>,
    secret: Secret,
    placement: Nodes,
    clients: usize,
    lost: usize,
}

/// A client and its domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Membership {
    domain: DomainName,
    member: MemberId,
}

/// A message for a client, with the file whose descriptor is sent with it.
pub(super) type OutMessage = (Vec<u8>, Option<Arc<File>>);

/// State left by a disconnected client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rest {
    Nothing,
    /// Its process has stable pages mapped.
    Holds,
}

impl Domains {
    /// Without rules, every domain is served, to the broker's own user.
    pub(super) fn new(rules: Vec<DomainRule>, limits: Limits, nodes: Vec<u32>, user: u32) -> Self {
        let all_pages = Arc::new(StableBound::new(limits.all_pages));
        Self { rules, limits, nodes, user, all_pages, by_name: BTreeMap::new() }
    }

    /// Whether a user may know all domains: root, and the broker's own one.
    pub(super) fn is_trusted(&self, user: u32) -> bool {
        user == 0 || user == self.user
    }

    /// Admits a client, if its user may join the domain.
    pub(super) fn join(
        &mut self,
        hello: Hello,
        user: u32,
    ) -> Result<(Membership, OutMessage), Refusal> {
        let Hello { domain: name, placement } = hello;
        let allowed = if self.rules.is_empty() {
            self.user
        } else {
            let rule = self.rules.iter().find(|rule| rule.name == name);
            let rule = rule.ok_or_else(|| Refusal::Domain(name.clone()))?;
            rule.user.unwrap_or(self.user)
        };
        if user != allowed && user != 0 {
            return Err(Refusal::User { domain: name, user });
        }
        if let Some(domain) = self.by_name.get(&name).filter(|domain| domain.placement != placement)
        {
            let theirs = domain.placement;
            return Err(Refusal::Placement { domain: name, theirs, wish: placement });
        }
        // The clients of one domain keep those of no other one out.
        let most = (self.limits.clients / self.rules.len().max(1)).max(1);
        let clients = self.by_name.get(&name).map_or(0, |domain| domain.clients + domain.lost);
        if clients >= most {
            return Err(Refusal::DomainClients { domain: name, most });
        }
        let domain = match self.by_name.entry(name.clone()) {
            std::collections::btree_map::Entry::Occupied(domain) => domain.into_mut(),
            std::collections::btree_map::Entry::Vacant(place) => {
                // Each node needs a file of its own.
                let least = self.nodes.len() as u64 * StableMemory::SEALED_SEGMENT_PAGES;
                let own_pages = Arc::new(StableBound::new(self.limits.domain_pages.max(least)));
                let bounds = vec![own_pages, Arc::clone(&self.all_pages)];
                let domain = Domain::new(placement, self.limits, bounds);
                place.insert(domain.map_err(Refusal::Random)?)
            }
        };
        let member = domain.ledger.join().ok_or(Refusal::Clients(self.limits.clients))?;
        domain.clients += 1;
        let welcome = Welcome {
            secret: domain.secret.0,
            nodes: self.nodes.clone(),
            limits: ToldLimits::from(&self.limits),
        };
        Ok((Membership { domain: name, member }, (Reply::Welcome(welcome).encode(), None)))
    }

    /// Processes a client's request, and appends the answer.
    pub(super) fn request(
        &mut self,
        membership: &Membership,
        request: Request<'_>,
        messages: &mut Vec<OutMessage>,
    ) -> Result<(), Refusal> {
        let Membership { domain: name, member } = membership;
        let member = *member;
        // A membership ends no later than its domain.
        let Some(domain) = self.by_name.get_mut(name) else { return Err(Refusal::NoHello) };
        let known_node = |node: Node| match domain.placement {
            Nodes::Across if node == Node::ANY => Ok(()),
            Nodes::Apart if self.nodes.contains(&node.0) => Ok(()),
            _ => Err(Refusal::Node { node: node.0, nodes: self.nodes.clone() }),
        };
        let reply = match request {
            Request::Hello(_) => return Err(Refusal::SecondHello),
            Request::Updates(updates) => {
                for (change, slot) in updates {
                    domain.ledger.change(member, change, slot)?;
                }
                return Ok(());
            }
            Request::Query { node, hashes } => {
                known_node(node)?;
                let mut answers = Vec::with_capacity(hashes.len());
                domain.ledger.query(member, node, &hashes, &mut answers);
                let slots = answers.iter().filter_map(|answer| match answer {
                    Answer::Stable(slot) => Some(*slot),
                    Answer::Unknown | Answer::Wanted => None,
                });
                domain.announce(member, slots, messages);
                Reply::Answers(answers)
            }
            Request::Publish { node, contents } => {
                if !self.nodes.contains(&node.0) {
                    known_node(node)?;
                }
                let mut slots = Vec::new();
                match domain.ledger.publish(member, node, contents, &mut slots) {
                    Ok(()) => {
                        domain.announce(member, slots.iter().copied(), messages);
                        Reply::Slots(slots)
                    }
                    Err(error) => {
                        let errno = match &error {
                            NoRoom::Domain(_) | NoRoom::Client(_) => rustix::io::Errno::DQUOT,
                            NoRoom::Reservations(_) => rustix::io::Errno::BUSY,
                            NoRoom::System(_) => rustix::io::Errno::NOMEM,
                        };
                        Reply::NoRoom { errno: errno.raw_os_error(), reason: error.to_string() }
                    }
                }
            }
            Request::Notifications => {
                Reply::Notifications(domain.ledger.take_notifications(member, BATCH_NOTIFICATIONS))
            }
        };
        let closed = domain.ledger.take_closed(member, BATCH_CLOSED);
        if !closed.is_empty() {
            messages.push((Reply::Closed(closed).encode(), None));
        }
        messages.push((reply.encode(), None));
        Ok(())
    }

    /// Ends a connection; the process behind it may still live.
    pub(super) fn disconnect(&mut self, membership: &Membership) -> Rest {
        let Some(domain) = self.by_name.get_mut(&membership.domain) else { return Rest::Nothing };
        domain.clients -= 1;
        if domain.ledger.disconnect(membership.member) {
            domain.lost += 1;
            return Rest::Holds;
        }
        self.end_if_unused(&membership.domain);
        Rest::Nothing
    }

    /// Ends the holds of a client that was [disconnected](Self::disconnect): its process has ended.
    pub(super) fn reap(&mut self, membership: &Membership) {
        let Some(domain) = self.by_name.get_mut(&membership.domain) else { return };
        domain.lost -= 1;
        domain.ledger.leave(membership.member);
        self.end_if_unused(&membership.domain);
    }

    pub(super) fn status(&self) -> Vec<DomainStatus> {
        self.by_name.iter().map(|(name, domain)| domain.status(name)).collect()
    }

    /// Removes a domain without clients; the next ones may choose another placement, and get
    /// another secret.
    fn end_if_unused(&mut self, name: &DomainName) {
        if self.by_name.get(name).is_some_and(|domain| domain.clients == 0 && domain.lost == 0) {
            self.by_name.remove(name);
        }
    }
}

impl Domain {
    fn new(
        placement: Nodes,
        limits: Limits,
        bounds: Vec<Arc<StableBound>>,
    ) -> rustix::io::Result<Self> {
        let mut secret = [0; 32];
        // getrandom(2) fills requests of up to 256 bytes completely.
        rustix::rand::getrandom(&mut secret, rustix::rand::GetRandomFlags::empty())?;
        let secret = Secret(secret);
        let slots = StableMemory::sealed(StableSegments::new(), bounds);
        let ledger = Ledger::new(slots, placement, PageHasher::new(&secret), limits);
        Ok(Self { ledger, secret, placement, clients: 0, lost: 0 })
    }

    /// Announces segments that are new to a client.
    fn announce(
        &mut self,
        member: MemberId,
        slots: impl Iterator<Item = StableSlot>,
        messages: &mut Vec<OutMessage>,
    ) {
        for StableSlot { segment, .. } in slots {
            if self.ledger.announce(member, segment)
                && let Some((descriptor, pages)) = self.ledger.slots().reader(segment)
            {
                let announcement = Reply::Segment { number: segment, pages };
                messages.push((announcement.encode(), Some(descriptor)));
            }
        }
    }

    fn status(&self, name: &DomainName) -> DomainStatus {
        let node = |node: Node| (node != Node::ANY).then_some(node.0);
        let nodes = self.ledger.counts().into_iter().map(|(number, counts)| NodeStatus {
            node: node(number),
            stable_pages: counts.pages,
            sharers: counts.shares,
            reservations: counts.reservations,
            remembered_hashes: counts.remembered_hashes,
        });
        DomainStatus {
            name: name.clone(),
            placement: self.placement,
            clients: self.clients,
            segments: self.ledger.slots().segments().count(),
            segment_pages: self.ledger.slots().pages_in_use() + self.ledger.slots().pages_kept(),
            nodes: nodes.collect(),
        }
    }
}
