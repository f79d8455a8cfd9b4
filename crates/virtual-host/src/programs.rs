//! The programs that lie beside the running one.

use std::env;
use std::path::{Path, PathBuf};

/// Names another guest agent than the one beside the running program.
pub const AGENT_VARIABLE: &str = "EBB_AGENT";
/// Names another monitor than the one beside the running program.
pub const MONITOR_VARIABLE: &str = "EBB_MONITOR";

/// The guest agent's executable: `chosen`, else `EBB_AGENT`, else `ebb-agent` beside the running
/// program or in the directory above (where cargo puts it, seen from a test). `None` if there is
/// none.
pub fn find_agent(chosen: Option<&Path>) -> Option<PathBuf> {
    find(chosen, AGENT_VARIABLE, "ebb-agent")
}

/// The monitor's executable: `chosen`, else `EBB_MONITOR`, else `ebb` found as
/// [`find_agent`] finds the agent.
pub fn find_monitor(chosen: Option<&Path>) -> Option<PathBuf> {
    find(chosen, MONITOR_VARIABLE, "ebb")
}

fn find(chosen: Option<&Path>, variable: &str, name: &str) -> Option<PathBuf> {
    let named = chosen.map(Path::to_owned).or_else(|| env::var_os(variable).map(PathBuf::from));
    named.or_else(|| {
        let program = env::current_exe().ok()?;
        program
            .ancestors()
            .skip(1)
            .take(2)
            .map(|directory| directory.join(name))
            .find(|path| path.is_file())
    })
}
