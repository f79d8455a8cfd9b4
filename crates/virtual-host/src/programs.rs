//! Finds the programs in the running program's directory.

use std::env;
use std::path::{Path, PathBuf};

/// Environment variable for a guest agent other than that in the running program's directory.
pub const AGENT_VARIABLE: &str = "EBB_AGENT";
/// Environment variable for a monitor other than that in the running program's directory.
pub const MONITOR_VARIABLE: &str = "EBB_MONITOR";

/// The guest agent's executable: `chosen`, else `EBB_AGENT`, else `ebb-agent` in the running
/// program's directory or the one above (where cargo puts it, relative to a test). `None` if there
/// is none.
pub fn find_agent(chosen: Option<&Path>) -> Option<PathBuf> {
    find(chosen, AGENT_VARIABLE, "ebb-agent")
}

/// The monitor's executable: `chosen`, else `EBB_MONITOR`, else `ebb` in the directories that
/// [`find_agent`] searches.
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
