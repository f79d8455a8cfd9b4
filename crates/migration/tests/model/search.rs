//! Breadth-first search of all states.

use std::collections::{HashSet, VecDeque};

use crate::machine::{Step, follow};
use crate::world::{Mutant, Scope};

/// Result of a search.
pub enum Found {
    /// The rule holds in all states.
    Nothing { states: usize },
    /// The rule is violated at the end of this path, which is one of the shortest.
    Violation { path: Vec<Step>, what: &'static str },
}

/// Searches all reachable states.
///
/// A state is reached by following its path from the initial state, since the engine's windows
/// borrow the tracker and cannot be copied.
pub fn search(scope: Scope, mutant: Mutant) -> Found {
    let mut seen = HashSet::new();
    let mut waiting = VecDeque::new();
    let start = follow(scope, mutant, &[]);
    seen.insert(start.key.clone());
    waiting.push_back((Vec::new(), start.next));
    while let Some((path, next)) = waiting.pop_front() {
        for step in next {
            let mut path: Vec<Step> = path.clone();
            path.push(step);
            let node = follow(scope, mutant, &path);
            if let Some(what) = node.violation {
                return Found::Violation { path, what };
            }
            if seen.insert(node.key) {
                waiting.push_back((path, node.next));
            }
        }
    }
    Found::Nothing { states: seen.len() }
}
