//! All interleavings of a source and a destination, over connections that are cut at every point.

use std::collections::{HashSet, VecDeque};

use super::*;

/// Most messages in transit in one direction.
const LONGEST_QUEUE: usize = 3;

/// One direction of the control connection.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct Line {
    under_way: Vec<MessageKind>,
    /// Messages sent from now on do not arrive.
    cut: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    source: Protocol,
    destination: Protocol,
    to_destination: Line,
    to_source: Line,
    /// A write of the side has failed.
    source_broken: bool,
    destination_broken: bool,
    /// The destination has started the guest.
    started: bool,
    /// The destination's process was killed.
    killed: bool,
}

/// Deliberate errors. The search must find each of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mistake {
    None,
    /// The source treats silence after its decision as a failure.
    SilenceIsFailure,
    /// The destination treats silence before the decision as a decision.
    SilenceIsDecision,
    /// The rest of an unsent decision is sent later.
    RestIsSent,
    /// The destination starts the guest and then reports a failure.
    FailedAfterStart,
    /// The destination may still report a failure that the source believes after its decision, and
    /// starts the guest anyway when the decision arrives.
    GivesUpAndReads,
    /// The destination reports the guest as running before it starts it.
    RunningBeforeStart,
}

impl World {
    fn new() -> Self {
        Self {
            source: Protocol::new(Side::Source),
            destination: Protocol::new(Side::Destination),
            to_destination: Line::default(),
            to_source: Line::default(),
            source_broken: false,
            destination_broken: false,
            started: false,
            killed: false,
        }
    }

    fn side(&mut self, side: Side) -> (&mut Protocol, &mut Line, &mut Line, &mut bool) {
        match side {
            Side::Source => (
                &mut self.source,
                &mut self.to_destination,
                &mut self.to_source,
                &mut self.source_broken,
            ),
            Side::Destination => (
                &mut self.destination,
                &mut self.to_source,
                &mut self.to_destination,
                &mut self.destination_broken,
            ),
        }
    }

    fn destination_may_run(&self) -> bool {
        !self.killed && self.destination.may_run()
    }

    /// The messages that the destination may send depend on whether the guest runs there: see
    /// `DestinationCommitted`.
    fn may_send(&self, side: Side, kind: MessageKind, mistake: Mistake) -> bool {
        match (side, kind) {
            (Side::Destination, MessageKind::Running) => {
                self.started || mistake == Mistake::RunningBeforeStart
            }
            (Side::Destination, MessageKind::Failed) => {
                !self.started || mistake == Mistake::FailedAfterStart
            }
            _ => true,
        }
    }

    /// Returns all possible next states.
    fn successors(&self, mistake: Mistake) -> Vec<Self> {
        let mut next = Vec::new();
        for side in [Side::Source, Side::Destination] {
            if side == Side::Destination && self.killed {
                continue;
            }
            for kind in MessageKind::ALL {
                next.extend(self.sends(side, kind, mistake));
            }
            next.extend(self.receives(side));
            let mut gives_up = self.clone();
            let (protocol, ..) = gives_up.side(side);
            let decided = protocol.stage() == Stage::Committed;
            let prepared = protocol.stage() == Stage::Prepared;
            protocol.lost();
            if side == Side::Source && decided && mistake == Mistake::SilenceIsFailure {
                protocol.stage = Stage::Over(End::Stays);
            }
            if side == Side::Destination && prepared && mistake == Mistake::SilenceIsDecision {
                protocol.stage = Stage::Committed;
            }
            next.push(gives_up);
        }
        if !self.killed && !self.started && self.destination.stage() == Stage::Committed {
            next.push(Self { started: true, ..self.clone() });
        }
        // A guest that dies with its monitor is outside of the protocol.
        if !self.killed && !self.started {
            let mut killed = Self { killed: true, ..self.clone() };
            killed.to_source.cut = true;
            killed.to_destination = Line { under_way: Vec::new(), cut: true };
            next.push(killed);
        }
        for side in [Side::Source, Side::Destination] {
            let mut copy = self.clone();
            let (_, line, ..) = copy.side(side);
            for kept in 0..=line.under_way.len() {
                let mut cut = self.clone();
                let (_, line, ..) = cut.side(side);
                line.under_way.truncate(kept);
                line.cut = true;
                next.push(cut);
            }
        }
        next
    }

    fn sends(&self, side: Side, kind: MessageKind, mistake: Mistake) -> Vec<Self> {
        let mut world = self.clone();
        let (protocol, line, _, broken) = world.side(side);
        let stage = protocol.stage();
        if *broken || line.under_way.len() == LONGEST_QUEUE || protocol.send(kind).is_err() {
            return Vec::new();
        }
        if !self.may_send(side, kind, mistake) {
            return Vec::new();
        }
        if !line.cut {
            line.under_way.push(kind);
        }
        let gives_up_and_reads = mistake == Mistake::GivesUpAndReads && kind == MessageKind::Failed;
        if side == Side::Destination && gives_up_and_reads {
            protocol.stage = stage;
        }
        let mut unsent = self.clone();
        let (protocol, line, _, broken) = unsent.side(side);
        // It was possible above.
        let _ = protocol.send(kind);
        protocol.unsent(kind);
        *broken = true;
        if mistake == Mistake::RestIsSent && !line.cut {
            line.under_way.push(kind);
        }
        vec![world, unsent]
    }

    fn receives(&self, side: Side) -> Option<Self> {
        let mut world = self.clone();
        let (protocol, _, line, _) = world.side(side);
        if line.under_way.is_empty() || matches!(protocol.stage(), Stage::Over(_)) {
            return None;
        }
        // An invalid message is dropped; giving up is a separate step.
        let _ = protocol.receive(line.under_way.remove(0));
        Some(world)
    }

    /// The invariant of every state.
    fn is_safe(&self) -> bool {
        let source = self.source.may_run();
        let both = source && self.destination_may_run();
        let started_under_source = source && self.started;
        let moved_nowhere = self.source.stage() == Stage::Over(End::Moved) && !self.started;
        // If neither may run it, an operator is informed, or a side still waits for a message or a
        // time limit.
        let neither = !source && !self.destination_may_run() && !self.started;
        let known = matches!(self.source.stage(), Stage::Over(End::Unknown) | Stage::Committed);
        !both && !started_under_source && !moved_nowhere && (!neither || known)
    }

    /// Whether both sides have ended.
    fn is_over(&self) -> bool {
        let over = |protocol: &Protocol| matches!(protocol.stage(), Stage::Over(_));
        over(&self.source) && (self.killed || over(&self.destination))
    }
}

/// Final stage of the source, and whether the destination has started the guest.
type Ending = (Stage, bool);

/// Visits every state. Returns the number of states and their ends, or the first one that violates
/// the invariant.
fn explore(mistake: Mistake) -> Result<(usize, HashSet<Ending>), Box<World>> {
    let mut seen = HashSet::from([World::new()]);
    let mut queue = VecDeque::from([World::new()]);
    let mut ends = HashSet::new();
    while let Some(world) = queue.pop_front() {
        if !world.is_safe() {
            return Err(Box::new(world));
        }
        if world.is_over() {
            ends.insert((world.source.stage(), world.started));
        }
        for next in world.successors(mistake) {
            if seen.insert(next.clone()) {
                queue.push_back(next);
            }
        }
    }
    Ok((seen.len(), ends))
}

#[test]
fn exactly_one_side_runs_the_guest_or_the_source_reports_unknown() {
    let (worlds, ends) = explore(Mistake::None).unwrap();
    assert!(worlds > 1000, "only {worlds} worlds");
    let expected = HashSet::from([
        (Stage::Over(End::Stays), false),
        (Stage::Over(End::Moved), true),
        (Stage::Over(End::Unknown), true),
        (Stage::Over(End::Unknown), false),
    ]);
    assert_eq!(ends, expected);
}

#[test]
fn the_search_finds_each_mistake() {
    for mistake in [
        Mistake::SilenceIsFailure,
        Mistake::SilenceIsDecision,
        Mistake::RestIsSent,
        Mistake::FailedAfterStart,
        Mistake::GivesUpAndReads,
        Mistake::RunningBeforeStart,
    ] {
        assert!(explore(mistake).is_err(), "{mistake:?} was not found");
    }
}

#[test]
fn from_ready_on_the_destination_fails_and_does_not_abort() {
    let mut destination = Protocol::new(Side::Destination);
    assert_eq!(destination.failure_message(), Some(MessageKind::Abort));
    for (sender, kind) in [
        (Side::Source, MessageKind::Hello),
        (Side::Destination, MessageKind::Hello),
        (Side::Source, MessageKind::Setup),
        (Side::Destination, MessageKind::Accept),
        (Side::Source, MessageKind::State),
        (Side::Destination, MessageKind::Ready),
    ] {
        let step = if sender == Side::Source { Protocol::receive } else { Protocol::send };
        step(&mut destination, kind).unwrap();
    }
    assert_eq!(destination.failure_message(), Some(MessageKind::Failed));
    destination.receive(MessageKind::Commit).unwrap();
    assert_eq!(destination.failure_message(), Some(MessageKind::Failed));
    assert!(destination.may_run());
    destination.send(MessageKind::Failed).unwrap();
    assert_eq!(destination.failure_message(), None);
    assert!(!destination.may_run());
}
