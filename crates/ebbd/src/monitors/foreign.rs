//! What other projects' monitors have in common: they undo nothing by themselves, and do not count
//! pauses. So their connections remember whose pause it is.

use ebb_host_policy::Action;

use super::Trouble;

/// Whether a machine's processors run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Condition {
    /// They do.
    Running,
    /// A client has paused them.
    Paused,
    /// Neither, and why it cannot be changed from here.
    Other(Trouble),
}

/// Whose pause a machine's is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Pause {
    /// Another client's, if there is one.
    #[default]
    Others,
    /// This connection has paused it, and not resumed it since.
    Ours,
}

/// A connection with another project's monitor.
pub(super) trait Foreign {
    /// The machine's condition now.
    async fn condition(&mut self) -> Result<Condition, Trouble>;
    /// Has a running machine stand still.
    async fn stand_still(&mut self) -> Result<(), Trouble>;
    /// Has a paused machine go on.
    async fn go_on(&mut self) -> Result<(), Trouble>;
    /// Sets the balloon's size.
    async fn set_balloon(&mut self, target_bytes: u64) -> Result<(), Trouble>;
    /// Whose pause there may be.
    fn pause(&mut self) -> &mut Pause;
    /// Begins to stop a machine that can be started again.
    fn stop(&mut self) -> Result<(), Trouble> {
        Err(Trouble::Unable)
    }

    /// Carries out an action.
    async fn act(&mut self, action: Action) -> Result<(), Trouble> {
        match action {
            Action::Balloon { target_bytes } => self.set_balloon(target_bytes).await,
            Action::Pause { .. } => {
                match self.condition().await? {
                    Condition::Running => self.stand_still().await?,
                    Condition::Paused if *self.pause() == Pause::Ours => {}
                    // That one is not this program's to end.
                    Condition::Paused => {
                        let text = "another client has paused it".to_owned();
                        return Err(Trouble::Refused(text));
                    }
                    Condition::Other(trouble) => return Err(trouble),
                }
                *self.pause() = Pause::Ours;
                Ok(())
            }
            Action::Resume => {
                match self.condition().await? {
                    Condition::Running => {}
                    Condition::Paused => self.go_on().await?,
                    Condition::Other(trouble) => return Err(trouble),
                }
                *self.pause() = Pause::Others;
                Ok(())
            }
            Action::Stop => self.stop(),
            Action::Reclaim | Action::Trim | Action::Park => Err(Trouble::Unable),
        }
    }
}
